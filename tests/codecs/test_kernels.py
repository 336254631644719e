"""The kernels against the reference: the same bytes, the same values, the same refusals; several nodes in one pass."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpld
from fpld import FrameError, Plan, decode, encode, kernels
from fpld.codecs import UniformCodec
from fpld.codecs.uniform import fast
from tests.helpers import ADVERSARIAL, make_plan

FAST = UniformCodec()
REFERENCE = UniformCodec(reference=True)


def plans(count: int, *, slots: int = 1, **changes: Any) -> list[Plan]:
    return [make_plan(**changes, node=k, slot=k if slots > 1 else 0, slots=slots) for k in range(count)]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6),
    st.one_of(st.integers(2, 300), st.integers(4000, 9000)),
    st.one_of(st.integers(1, 15).map(float), st.floats(1, 17)),
    st.booleans(),
    st.sampled_from([1, 5]),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.integers(0, 2**32 - 1),
)
def test_bytes_and_values_are_those_of_the_reference(
    contexts: int, vocab: int, rate: float, own: bool, slots: int, kind: str, seed: int
) -> None:
    plan = make_plan(
        contexts=contexts,
        vocab=vocab,
        bits=vocab * rate + (40 if own else 0),
        clip=None if own else 2.0,
        slot=slots - 1,
        slots=slots,
    )
    rng = np.random.default_rng(seed)
    payload = encode(FAST, ADVERSARIAL[kind](rng, plan.shape), plan)
    assert payload == encode(REFERENCE, ADVERSARIAL[kind](np.random.default_rng(seed), plan.shape), plan)
    # And any other bytes of this length, with the ranges left as they are.
    noise = bytearray(payload)
    side = 4 * contexts if own else 0
    noise[side:] = rng.bytes(len(payload) - side)
    for data in (payload, bytes(noise)):
        quick = decode(FAST, data, plan)
        slow = decode(REFERENCE, data, plan)
        assert np.array_equal(quick.values, slow.values)
        assert np.array_equal(quick.variance, slow.variance)
        assert np.array_equal(quick.bias, slow.bias)


@pytest.mark.parametrize("slots", [1, 11])
@pytest.mark.parametrize("clip", [None, 3.0])
def test_adding_nodes_in_one_pass_is_adding_them_one_by_one(slots: int, clip: float | None) -> None:
    """Eleven nodes (more than a batch) with budgets of their own, for a block in the middle."""
    rng = np.random.default_rng(1)
    bits = rng.uniform(2, 9, 11) * 700
    listed = [
        make_plan(contexts=7, vocab=700, bits=float(b), clip=clip, node=k, slot=k if slots > 1 else 0, slots=slots)
        for k, b in enumerate(bits)
    ]
    payloads = [encode(FAST, rng.normal(0, 1, plan.shape).astype(np.float32), plan) for plan in listed]
    rows = range(2, 6)
    sampled = np.array([0, 3])
    decoded = [decode(REFERENCE, *pair, rows) for pair in zip(payloads, listed, strict=True)]
    variances = np.stack([np.broadcast_to(each.variance, (4, 700)).astype(np.float64) for each in decoded])
    for weighted in (False, True):
        total = np.ones((4, 700), np.float32)
        noise = np.zeros((2, 700))
        weights = np.zeros((4, 700)) if weighted else None
        noise_of = fast.add_nodes(payloads, listed, rows, total, sampled, noise, weights)
        expected = np.ones((4, 700), np.float32)
        for each, variance in zip(decoded, variances, strict=True):
            expected += each.values / variance if weighted else each.values
        if weights is None:
            assert np.array_equal(total, expected)
        else:
            assert np.allclose(weights, (1 / variances).sum(axis=0), rtol=1e-4)
            assert np.allclose(total / weights, expected / weights, rtol=1e-4, atol=1e-5)
        assert np.allclose(noise, variances.sum(axis=0)[sampled], rtol=1e-4)
        assert np.allclose(noise_of, variances.sum(axis=(1, 2)), rtol=1e-4)


@pytest.mark.parametrize("codec", [FAST, REFERENCE])
def test_a_check_refuses_what_decoding_would(codec: UniformCodec) -> None:
    plan = make_plan(clip=None, bits=150.0)
    payload = encode(codec, np.zeros(plan.shape), plan)
    codec.reader(payload, plan).check()
    with pytest.raises(FrameError, match="payload must be 112 bytes"):
        codec.reader(payload + b"\0", plan)
    bad = payload[:2] + b"\xff\xff" + payload[4:]
    total = np.zeros(plan.shape, np.float32)
    with pytest.raises(FrameError, match="range"):
        codec.reader(bad, plan).check()
    with pytest.raises(FrameError, match="range"):
        fast.add_nodes([bad], [plan], range(6), total)
    with pytest.raises(FrameError, match="payload must be 112 bytes"):
        fast.add_nodes([payload[:-1]], [plan], range(6), total)


def test_torch_tensors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    plan = make_plan()
    logits = torch.linspace(-3, 3, 300).reshape(6, 50).requires_grad_()
    assert encode(FAST, logits, plan) == encode(FAST, logits.detach().numpy(), plan)
    half = logits.detach().bfloat16()
    assert encode(FAST, half, plan) == encode(FAST, half.float().numpy(), plan)


def test_without_numba_the_reference_serves_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _name: None)
    kernels.numba_available.cache_clear()
    plan = make_plan()
    values = np.linspace(-3, 3, 300).reshape(6, 50)
    with caplog.at_level(logging.WARNING):
        assert encode(UniformCodec(), values, plan) == encode(REFERENCE, values, plan)
        decode(UniformCodec(), encode(REFERENCE, values, plan), plan)
    assert caplog.messages == ["numba is missing: plain Python and NumPy serve, slower; pip install 'fpld[fast]'"]
    kernels.numba_available.cache_clear()


@pytest.mark.slow
def test_a_read_only_installation_has_its_cache_elsewhere(tmp_path: Path) -> None:
    """The second process finds compiled code in the user's cache folder; without any folder it compiles anew."""
    package = tmp_path / "site" / "fpld"
    shutil.copytree(Path(fpld.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [package, *package.rglob("*")]:
        if folder.is_dir():
            (folder / "__pycache__").write_text(
                ""
            )  # a file where numba wants a folder: no permission would do it for root
    code = (
        "import numpy as np; from fpld import Plan; from fpld.codecs import UniformCodec; "
        "from fpld.codecs.uniform import kernels; "
        "plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=2, vocab=9, bits=40.0, clip=1.0); "
        "UniformCodec().encode([np.zeros((2, 9))], plan); print(sum(kernels.encode_rows.stats.cache_hits.values()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    hits = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
        )
        hits.append(int(done.stdout))
    assert hits == [0, 1]


@pytest.mark.slow
def test_a_cache_that_names_classes_of_another_version_is_dropped(tmp_path: Path) -> None:
    """The kernel keeps its line, and so its index; the class of its argument has another name in the second version."""
    source = (
        "import numpy as np; from typing import NamedTuple; from fpld.kernels import kernel\n"
        "class {name}(NamedTuple):\n    array: object\n\n"
        "@kernel\ndef first(pair):\n    return pair.array[0]\n\n"
        "print(first({name}(np.ones(2))), sum(first.stats.cache_hits.values()))\n"
    )
    outcomes = []
    for name in ("Before", "After", "After"):
        (tmp_path / "versions.py").write_text(source.format(name=name))
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(fpld.__file__).parents[1]}"}
        done = subprocess.run(
            [sys.executable, "-c", "import versions"], capture_output=True, text=True, env=environment, check=True
        )
        outcomes.append(done.stdout.split())
    assert outcomes == [["1.0", "0"], ["1.0", "0"], ["1.0", "1"]]


def test_kernels_in_the_cache_are_told_from_those_to_be_compiled(tmp_path: Path) -> None:
    """A node's prefork server reads what is compiled, and lets no message wait for a compilation."""
    script = "from fpld import kernels\nfrom fpld.codecs import rangecoder\nprint(kernels.in_cache(rangecoder))\n"
    use = (
        "coder = rangecoder.writer(64, __import__('numpy').zeros(1, 'int32'))\nrangecoder.code_raw_bits(coder, 3, 5)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    lines = [
        subprocess.run(
            [sys.executable, "-c", script + use], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert lines == ["False\n", "True\n"]


def test_compilation_is_counted_and_announced_once(tmp_path: Path) -> None:
    (tmp_path / "own_kernel.py").write_text(
        "import logging\n"
        "from fpld.kernels import compilations, kernel\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "@kernel\n"
        "def add(a, b):\n"
        "    return a + b\n"
        "add(1, 2)\nadd(1.0, 2.0)\n"
        "print(compilations.count)\n"
    )
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(fpld.__path__[0]).parent),
    }
    for compiled in (2, 0):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "own_kernel.py")],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [str(compiled)]
        assert done.stderr.count("once on this machine") == min(compiled, 1)
