"""What a machine computes with: its devices, their precision, their memory, the threads of a process."""

import os
from collections.abc import Callable

from fpld.errors import InputError, MissingExtraError, ParameterError
from fpld.units import show_count
from fpld.validation import check_count

try:
    import torch
except ImportError as error:
    raise MissingExtraError("a device of PyTorch", "torch") from error


def use_threads(count: int) -> None:
    """Set PyTorch to `count` threads in this process; the bits of a result depend on it."""
    check_count("count", count, 1)
    torch.set_num_threads(count)


def pick_device(device: str) -> torch.device:
    """Return the device by name; "auto" takes the first that is there of "cuda", "mps" and "cpu"."""
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise InputError(f"device must be 'auto', 'cpu', 'cuda' or 'mps', got {device!r}")
    available = available_devices()
    if device == "auto":
        return torch.device(available[0])
    if device not in available:
        raise InputError(f"device must be 'cpu' or 'auto' here, got {device!r}, but PyTorch finds no GPU of that kind")
    return torch.device(device)


def pick_precision(dtype: str, device: torch.device) -> torch.dtype:
    """Return the precision of training steps by name; "auto" is bfloat16 on a GPU that has it, else float32."""
    if dtype == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if half else torch.float32
    precisions = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in precisions:
        raise InputError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got {dtype!r}")
    return precisions[dtype]


def largest_that_fits(attempt: Callable[[int], None], most: int) -> int:
    """Return the largest of `most`, its half, its quarter and so on that can be computed without memory running out.

    Raises
    ------
    torch.OutOfMemoryError
        If not even one can.
    """
    count = most
    while True:
        try:
            attempt(count)
        except torch.OutOfMemoryError:
            if count == 1:
                raise
        else:
            return count
        torch.cuda.empty_cache()
        count = -(-count // 2)


def available_devices() -> list[str]:
    """Return the devices that PyTorch finds on this machine, the fastest first."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [name for name, is_there in there.items() if is_there]


def check_processes(device: torch.device, count: int) -> None:
    """Raise ParameterError if a training on a device cannot run in so many processes, each on a GPU of its own."""
    if count == 1 or device.type == "cpu":
        return
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    if count > gpus:
        raise ParameterError(
            "processes", f"must be at most {gpus}, as many as there are GPUs ({device.type}), got {count}: set it lower"
        )


def describe_device(device: str, workers: int, threads: int, processes: int = 1) -> str:
    """Return in words where a machine computes, and what of it stands idle.

    Parameters
    ----------
    device
        A device, or "auto".
    workers, threads
        How many processes compute side by side, and the threads of each.
    processes
        How many processes each training has.
    """
    place = pick_device(device)
    check_processes(place, processes)
    chosen = place.type
    available = available_devices()
    text = f"models are computed on {chosen}"
    if chosen == "cpu":
        cores = os.cpu_count() or 1
        busy = workers * processes * threads
        each = f"{show_count(threads, 'thread')} in each of {show_count(workers * processes, 'process')}"
        text += f", with {each} on {show_count(cores, 'core')}"
        if busy < cores:
            text += f": {show_count(cores - busy, 'core')} idle"
    if available[0] not in ("cpu", chosen):
        text += f"; a GPU is there and not used ({available[0]})"
    gpus = torch.cuda.device_count() if chosen == "cuda" else 1
    if processes > 1:
        text += f"; each training has {processes} processes"
    if gpus == 1 or processes == gpus:
        return text
    return f"{text}; {processes} of {gpus} GPUs {'is' if processes == 1 else 'are'} used"
