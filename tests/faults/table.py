"""The faults that must not break a federation: each with its promise, and the tests that hold it.

`python -m tests.faults.table` writes docs/reliability.md from it.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/reliability.md"
RESULTS = ROOT / "docs/results/reliability.json"


class Row(NamedTuple):
    """A fault, what is promised, the tests (file::name, below tests/), and what they leave out."""

    fault: str
    promise: str
    tests: tuple[str, ...]
    without: str = ""


WIRE = "protocol/test_wire.py::"
MACHINES = "protocol/test_machines.py::"
REFUSALS = "engines/flower/test_refusals.py::"
CODECS = "codecs/test_codecs.py::"
RUN = "federation/test_run.py::"
CRASH = "federation/test_crash.py::"
CLAIMS = "faults/test_claims.py::"
ANSWERS = "faults/test_answers.py::"
PAGES = "faults/test_pages.py::"
HEALING = "engines/flower/test_healing.py::"
OPERATIONS = "engines/flower/test_operations.py::"
EXHAUSTED = "engines/flower/test_exhausted.py::"
ORDERS = "engines/flower/test_orders.py::"
NODES = "protocol/test_nodes.py::"
FAULTS = "federation/test_faults.py::"
RECEIVE = "engines/flower/test_receive.py::"
DISKS = "faults/test_disks.py::"
ROUNDS = "faults/test_rounds.py::"
INPUTS = "faults/test_inputs.py::"
STORED = "data/test_stored.py::"
SITES = "faults/test_sites.py::"

DECODER = (
    Row(
        "a frame is empty, or cut at any offset", "typed error, no partial state", (WIRE + "test_cut_at_every_offset",)
    ),
    Row(
        "trailing bytes",
        "refused",
        (WIRE + "test_trailing_bytes", CODECS + "test_what_an_encoder_wrote_passes_and_a_byte_more_does_not"),
    ),
    Row(
        "wrong magic or version",
        "refused, the version that is read is named",
        (WIRE + "test_other_codec_version_and_key_are_named",),
    ),
    Row(
        "m, V, bits, round, run or node differ",
        "refused before anything is allocated",
        (
            WIRE + "test_a_frame_of_another_plan_is_refused_and_named",
            WIRE + "test_a_prior_or_tables_that_differ_in_one_integer_are_refused",
        ),
    ),
    Row(
        "a header claims 2^40 coordinates",
        "refused, memory does not move",
        (WIRE + "test_a_claim_of_huge_sizes_moves_no_memory",),
    ),
    Row(
        "an index above the level count",
        "cannot be written: every digit is below its radix; other codecs refuse the frame",
        (
            "codecs/test_uniform.py::test_any_bytes_of_the_right_length_decode_to_values_in_range",
            CODECS + "test_hostile_payloads_are_refused_or_decode_to_finite_values",
        ),
    ),
    Row(
        "a value out of range",
        "refused and recorded",
        (
            CLAIMS + "test_a_stated_range_beyond_the_largest_logit_is_refused",
            CLAIMS + "test_no_range_that_is_taken_decodes_beyond_the_largest_logit",
            CLAIMS + "test_float32_logits_beyond_the_largest_are_refused_at_both_ends",
        ),
    ),
    Row("any bit flipped", "refused by the checksum", (WIRE + "test_every_flipped_bit",)),
    Row("a right frame with another node's key", "refused", (NODES + "test_a_mac_binds_a_frame_to_its_node",)),
    Row(
        "replay of an earlier round or of another run",
        "refused",
        (REFUSALS + "test_a_replayed_frame_and_one_of_another_run",),
    ),
    Row(
        "a duplicate with the same bytes",
        "acknowledged, counted once",
        (MACHINES + "test_repeated_frames_count_once_and_conflicting_ones_are_refused",),
    ),
    Row(
        "a duplicate with other bytes",
        "the first counts, the second is refused and recorded",
        (MACHINES + "test_repeated_frames_count_once_and_conflicting_ones_are_refused",),
    ),
    Row(
        "over budget",
        "refused at both ends",
        (WIRE + "test_over_budget_is_refused_at_both_ends", REFUSALS + "test_an_over_budget_frame_at_both_ends"),
    ),
    Row(
        "a compressed or nested payload",
        "not in the format: a payload has one length, known from the plan",
        (WIRE + "test_other_formats_are_refused_at_the_magic",),
    ),
    Row(
        "pickle, npy or JSON instead of a frame",
        "refused at the magic",
        (WIRE + "test_other_formats_are_refused_at_the_magic", ORDERS + "test_payloads_of_other_types_are_refused"),
    ),
    Row(
        "another probe set or tokenizer",
        "refused, both named in the node's log",
        (
            ORDERS + "test_a_task_for_another_probe_set",
            REFUSALS + "test_a_site_that_insists_on_another_probe_set_or_tokenizer",
        ),
    ),
    Row(
        "another clip, step or dither",
        "refused: the plan's digest is in the frame",
        (WIRE + "test_a_frame_of_another_plan_is_refused_and_named",),
    ),
)
NODE = (
    Row(
        "NaN or infinite logits",
        "refused, with the context and the token",
        (CODECS + "test_values_that_are_not_finite_are_refused_by_place",),
    ),
    Row(
        "logits all equal, huge, denormal, of half precision",
        "a defined result",
        (
            CODECS + "test_half_precision_equal_and_denormal_logits_have_a_defined_result",
            CODECS + "test_no_budget_is_exceeded",
        ),
    ),
    Row(
        "wrong V, or contexts in another order",
        "refused by the probe set's digest",
        (
            "data/test_probe.py::test_any_other_token_gives_another_digest",
            ORDERS + "test_another_tokenizer_or_vocabulary_than_the_probe_sets",
        ),
    ),
    Row(
        "too small a budget",
        "refused before any training",
        (
            CODECS + "test_the_least_budget_works_and_less_is_refused",
            "budget/test_limits.py::test_what_is_infeasible_says_what_would_do",
        ),
    ),
    Row(
        "a crash between coding and sending",
        "the same bytes again, no new dither",
        (
            NODES + "test_a_node_answers_a_repeated_task_with_the_same_bytes",
            DISKS + "test_nodes_that_are_a_round_ahead_send_the_same_frames_again",
        ),
    ),
    Row(
        "a student of another hash, another run, or another shape",
        "refused, the old one kept",
        (
            ORDERS + "test_orders_that_are_not_of_this_aggregator_or_not_whole",
            "students/test_conformance.py::test_a_refused_state_changes_nothing",
        ),
    ),
)
AGGREGATOR = (
    Row(
        "a late frame",
        "refused, the result is as if it had never been sent",
        (ROUNDS + "test_a_late_frame_changes_nothing", FAULTS + "test_a_late_node_is_refused_then_takes_part_again"),
    ),
    Row(
        "fewer than the quorum",
        "never averaged in silence",
        (
            ROUNDS + "test_below_the_quorum_nothing_is_combined",
            REFUSALS + "test_below_the_quorum_the_run_stops_and_can_be_resumed",
        ),
    ),
    Row(
        "a node drops out after its frame was accepted",
        "it counts",
        (ROUNDS + "test_the_divisor_is_the_accepted_set_and_who_dropped_after_acceptance_counts",),
    ),
    Row(
        "the set of nodes changes",
        "the divisor is the accepted set, which the trace records",
        (
            ROUNDS + "test_the_divisor_is_the_accepted_set_and_who_dropped_after_acceptance_counts",
            FAULTS + "test_a_failing_node_is_named_and_the_others_go_on",
        ),
    ),
    Row(
        "SIGKILL at any moment",
        "resumed bit for bit",
        (
            CRASH + "test_sigkill_at_random_moments_gives_identical_students",
            "federation/test_state.py::test_a_crash_between_trace_and_checkpoint",
        ),
    ),
    Row(
        "a disk that is full or read-only",
        "the old checkpoint is intact, a clear stop",
        (
            CRASH + "test_a_disk_that_refuses_is_said_and_loses_nothing",
            CRASH + "test_an_unwritable_folder_is_said",
            "faults/test_inputs.py::test_a_full_disk_under_the_spool_is_said",
        ),
    ),
    Row(
        "a torn, flipped, empty or foreign checkpoint, or any other file that a run reads again",
        "found by its digest; the one before is used, with a message",
        (
            DISKS + "test_every_flipped_bit_of_a_state_is_found",
            DISKS + "test_a_run_goes_on_identically_from_the_file_before",
            DISKS + "test_the_checkpoint_of_another_run_is_refused",
            DISKS + "test_what_a_run_makes_once_is_sealed",
            DISKS + "test_another_number_in_the_trace_is_found",
            DISKS + "test_models_that_are_kept_are_of_this_run",
            CRASH + "test_a_damaged_file_gives_the_same_result_or_an_error",
        ),
    ),
    Row(
        "two aggregators on one folder",
        "the second is refused, and what the first has made stays",
        (
            REFUSALS + "test_two_aggregators_on_one_folder",
            RUN + "test_folders_in_use_or_of_another_run_are_refused",
            "test_api.py::test_a_start_that_is_refused_leaves_the_folder_of_the_run_that_works",
        ),
    ),
    Row(
        "the clock jumps",
        "deadlines are by a clock that does not",
        (ROUNDS + "test_a_clock_that_jumps_neither_ends_nor_holds_up_a_round",),
    ),
    Row(
        "a slow sender, half-open connections",
        "others are not held up, nor is the deadline",
        (
            RECEIVE + "test_a_slow_reply_holds_up_no_other_and_not_the_deadline",
            RECEIVE + "test_pieces_that_never_come_are_given_up",
            PAGES + "test_half_open_connections_are_closed_and_others_are_served",
            PAGES + "test_forms_that_never_come_whole_keep_nobody_out",
        ),
    ),
    Row(
        "an unregistered key, another authority, an expired certificate, no TLS",
        "rejected",
        (
            "engines/flower/test_admission.py::test_plaintext_unregistered_and_wrong_authority_are_turned_away",
            "engines/flower/test_fault_table.py::test_each_fault_looks_as_the_page_says",
            REFUSALS + "test_an_unregistered_key_under_a_registered_name",
        ),
    ),
    Row(
        "one node, or nodes that are all equal",
        "a defined result",
        ("federation/test_rules_in_runs.py::test_of_one_node_every_rule_makes_that_node",),
    ),
    Row(
        "distillation diverges",
        "not broadcast, the last good student is kept",
        (RUN + "test_a_diverging_student_is_not_broadcast",),
    ),
    Row(
        "SIGTERM or Ctrl-C",
        "a clean checkpoint, and the end",
        (
            CRASH + "test_an_interrupt_ends_cleanly_and_can_be_resumed",
            "engines/flower/test_deployment.py::test_a_stop_is_clean",
        ),
    ),
    Row(
        "names of nodes with control characters or paths",
        "refused",
        (
            RUN + "test_bad_configurations_are_one_line_that_names_the_key",
            ORDERS + "test_payloads_of_other_types_are_refused",
        ),
    ),
)
MORE = (
    Row(
        "--resume beside a user's own hidden files",
        "only half-written files of the run are deleted, by their whole name",
        (DISKS + "test_resume_deletes_only_its_own_half_written_files",),
    ),
    Row(
        "bytes with another meaning for none: a clip of negative zero, cells of groups that nobody reads",
        "refused: what a payload says has one form",
        (
            CLAIMS + "test_a_negative_zero_in_the_place_of_no_clip_is_refused",
            CLAIMS + "test_a_predictive_head_that_no_encoder_writes_is_refused",
            CLAIMS + "test_cells_of_groups_without_coordinates_are_refused",
        ),
    ),
    Row(
        "a node's own model that learns from the last student, in a run with [privacy]",
        "it learns from the student alone: its text without noise stays out",
        ("node/test_training.py::test_with_privacy_a_nodes_own_model_learns_from_the_last_student_alone",),
    ),
    Row(
        "an answer with the wrong types, a loss of 4000, no evaluation at all",
        "that node's refusal in the trace; the result can be read",
        (ANSWERS + "test_wrong_evaluations_are_refusals_and_the_result_can_be_read",),
    ),
    Row(
        "an error text of 1.5 MB, with escape sequences",
        "one printable line of at most 256 characters",
        (ANSWERS + "test_a_reason_is_one_short_printable_line",),
    ),
    Row(
        "escape sequences and marks that turn text, in keys of a configuration, texts and folders; values of 5 MB",
        "no terminal and no page gets them; values in errors are cut",
        (
            INPUTS + "test_keys_and_values_reach_a_terminal_without_escape_sequences_and_cut",
            INPUTS + "test_texts_reach_a_terminal_without_escape_sequences",
            INPUTS + "test_generated_text_reaches_a_terminal_without_escape_sequences",
            INPUTS + "test_what_a_student_writes_reaches_no_terminal_and_no_page_as_it_is",
            INPUTS + "test_texts_reach_a_page_without_marks_that_turn_them",
        ),
    ),
    Row(
        "claims of no noise, of a huge range, of certainty",
        "the next round works; at most twice an even share; no more weight than the median node",
        (
            CLAIMS + "test_no_claim_breaks_the_next_round_or_takes_more_than_twice_an_even_share",
            CLAIMS + "test_one_node_of_eight_that_claims_certainty_does_not_take_everything",
        ),
    ),
    Row(
        "a reply that is huge, folded, torn, or says that it is another's",
        "refused before it is read, as that node's failure; the aggregator's memory does not move",
        (
            RECEIVE + "test_a_huge_reply_is_refused_before_it_is_read",
            RECEIVE + "test_a_piece_that_is_named_a_million_times_is_not_unfolded",
            RECEIVE + "test_pieces_that_are_not_what_they_must_be_are_that_nodes_failure",
            RECEIVE + "test_who_answers_for_another_is_refused",
        ),
        "what the SuperLink itself takes in, which is Flower's; docs/deploy.md puts a proxy with a limit before it",
    ),
    Row(
        "requests beyond a node's limits",
        "refused and logged there; every frame and every loss is in its ledger",
        (
            SITES + "test_a_site_refuses_what_its_ledger_does_not_allow_and_logs_it",
            SITES + "test_a_site_tells_only_so_many_losses",
            SITES + "test_evaluations_and_probe_sets_are_in_the_ledger_and_have_limits",
        ),
    ),
    Row(
        "several runs ask a node at the same moment",
        "what each answer may take is reserved under a lock before its work: all of them together keep the limits",
        (
            SITES + "test_limits_hold_for_queries_side_by_side",
            SITES + "test_what_a_killed_process_had_reserved_is_free_again",
        ),
    ),
    Row(
        "private training that ends in an error, or is killed",
        "what it spends is in the ledger from the moment when it begins",
        (
            "engines/flower/test_privacy.py::test_private_training_that_ends_in_an_error_is_in_the_ledger",
            SITES + "test_private_training_that_was_killed_is_spent",
        ),
    ),
    Row(
        "a task of some hundred bytes that claims 2^32 contexts, with a wrong tag or a right one",
        "its tag is checked before it is parsed; it is parsed in the sandbox, and blocks are counted, not listed",
        (
            ORDERS + "test_a_task_that_claims_huge_sizes_moves_no_memory",
            ORDERS + "test_no_task_is_parsed_before_the_tag_is_checked",
        ),
    ),
    Row(
        "other code than ours from the SuperLink",
        "never imported at a node that `fpld node` runs",
        (SITES + "test_the_nodes_app_is_the_installed_one_whatever_is_served",),
        "Flower's --trusted-entities needs apps that its own platform has signed, so it is not used",
    ),
    Row(
        "a model's file names a folder of the node's disk; an index of weights names a pickle, or a file elsewhere",
        "only folders that `models` in `node.toml` allows are read, and in them *.safetensors alone",
        (
            ORDERS + "test_only_models_that_the_site_allows_are_read_from_its_disk",
            INPUTS + "test_an_index_names_safetensors_beside_it_alone",
        ),
    ),
    Row(
        "errors at a node",
        "a code and a sentence leave, details stay in its log",
        (SITES + "test_no_detail_of_an_error_leaves_a_site",),
    ),
    Row(
        "folders edited by hand, links that lead out, guessed tokens",
        "reported, not followed, slow",
        (
            PAGES + "test_a_folder_edited_by_hand_is_said_to_be_so",
            PAGES + "test_a_link_is_not_followed_out_of_the_folder",
            PAGES + "test_guessing_is_slow_however_many_guess",
        ),
    ),
    Row(
        "a node is killed and started again while it works",
        "let in at once, asked again in the same round, the same result",
        (
            "engines/flower/test_kills.py::test_whatever_is_killed_while_nodes_train_heals_and_nothing_is_counted_twice",
            HEALING + "test_a_node_that_was_killed_signs_off_what_is_left_of_it",
            HEALING + "test_a_node_that_is_lost_and_back_is_asked_again_in_the_same_round",
        ),
    ),
    Row(
        "a node that is started twice",
        "the second is refused in a sentence; where the aggregator sees two, it logs a warning",
        (
            HEALING + "test_a_site_is_started_once",
            HEALING + "test_two_processes_with_one_key_are_said_by_the_aggregator",
        ),
    ),
    Row(
        "a node's work is killed, takes too much memory or too long",
        "a typed answer at once, not a silence",
        (
            HEALING + "test_work_apart_answers_whatever_becomes_of_it",
            HEALING + "test_work_apart_has_its_memory_and_its_time",
        ),
    ),
    Row(
        "no space, no memory, no file handles",
        "reported, with what to free; the run's last line has room that was kept for it",
        (
            OPERATIONS + "test_a_run_says_that_its_disk_is_full_in_the_room_that_it_kept",
            OPERATIONS + "test_what_ran_out_is_said",
            OPERATIONS + "test_a_log_that_cannot_be_written_ends_no_run",
        ),
    ),
    Row(
        "a worker process of a run is killed",
        "reported in a sentence, and the run can be resumed",
        (
            INPUTS + "test_a_lost_worker_is_said",
            "federation/test_crash.py::test_a_run_that_loses_a_worker_says_so_and_is_resumed_to_the_same_student",
            INPUTS + "test_a_command_without_memory_says_so",
            INPUTS + "test_a_run_without_address_space_says_so",
        ),
    ),
    Row(
        "a batch or worker processes beyond reason, 50,000 unknown tables, a key of 50,000 parts, `/dev/zero` as text",
        "refused in seconds, by key",
        (
            INPUTS + "test_sizes_that_no_machine_has_are_refused",
            INPUTS + "test_of_very_many_problems_the_first_are_named",
            INPUTS + "test_toml_that_no_parser_likes",
            INPUTS + "test_a_device_is_no_text",
        ),
    ),
    Row(
        "a tokenizer of a model's folder that cannot be read, a trace of nested braces",
        "a typed error that names the file",
        (
            INPUTS + "test_a_model_with_a_bad_tokenizer_is_refused",
            INPUTS + "test_a_trace_of_nested_braces_is_damaged",
        ),
    ),
    Row(
        "a deployment's disk is full, or it has no file handle or no memory left, at either end",
        "reported, with what to free, and no process stays behind; then it continues to the undisturbed result",
        (EXHAUSTED + "test_either_end_runs_out_of_disk_file_handles_and_memory",),
    ),
    Row(
        "a node, the SuperLink or the aggregator is killed at any moment",
        "it continues by itself once that is started again, with the same result",
        ("engines/flower/test_kills.py::test_whatever_is_killed_while_nodes_train_heals_and_nothing_is_counted_twice",),
    ),
    Row(
        "a node dies while it sends its answer",
        "lost, and asked again when it is back",
        (RECEIVE + "test_a_node_that_goes_while_it_sends_is_lost_and_not_waited_for",),
    ),
    Row(
        "a node is revoked while the run is under way",
        "it is asked for nothing from the next round on",
        (REFUSALS + "test_a_site_is_revoked_while_the_run_goes_on",),
    ),
    Row(
        "ends of different versions",
        "refused in a sentence when a node joins",
        (REFUSALS + "test_another_version_of_the_wire_is_refused_in_a_sentence",),
    ),
    Row(
        "a process is killed while it prepares a large text",
        "packs of tokens that were whole are used, the rest is made again: the same tokens",
        (
            STORED + "test_sigkill_at_any_moment_of_preparing_loses_only_what_was_not_whole",
            STORED + "test_preparing_goes_on_after_a_kill",
        ),
    ),
    Row(
        "a disk fills up while a large text is prepared",
        "typed error; nothing half-written stays, and it continues from the last whole pack",
        (
            STORED + "test_a_disk_that_fills_up_while_a_text_is_prepared",
            STORED + "test_a_full_disk_is_said_and_leaves_whole_packs",
        ),
    ),
    Row(
        "certificates that end, clocks that differ",
        "reported a month ahead, and named",
        (
            OPERATIONS + "test_certificates_that_end_are_said_a_month_ahead",
            OPERATIONS + "test_clocks_that_differ_are_named",
        ),
    ),
)
PARTS = {"Decoder": DECODER, "Node": NODE, "Aggregator": AGGREGATOR, "Around them": MORE}

HEAD = """\
# What must not break it

Each fault with what is guaranteed and the tests that hold it. `python -m tests.faults.table` makes the page from
`tests/faults/table.py`.
"""
FUZZ = """\
## Fuzzing

`make fuzz` (`python -m tests.fuzz --minutes 30`) tries hostile input of the kinds in the table. Payloads are of every
codec, with right checksums. Tasks claim any sizes, and those under wrong tags must not be parsed. Protocol events come
in any order, beside a count of their own. Folders of runs are shown and resumed. With `--bounds` the kernels check
every index. Only typed errors may come of them, and nothing damaged may be used in silence. The command prints what it
tried; an example is named by target, seed and number. A slice of each is in `tests/fuzz/test_fuzz.py`, one with bounds
checks too.
"""
KILLS = """\
## Killed and damaged runs

`python -m benchmarks.kill_and_resume` kills runs (n-gram students, two worker processes, FedAvg beside) with SIGKILL at
random moments, together with their workers, and resumes them. With `--workers` one worker process is killed: the run
must end by itself and say why. With `--damage` one file of a stopped run is changed: some bits flipped, its end cut
off, emptied, or that of a run with another seed in its place. Students, table and trace are compared with those of an
undisturbed run, bit for bit.
"""
LAB = """\
## Killed deployments

`python -m benchmarks.kill_lab` runs federations of three nodes over Flower on loopback, with TLS and node
authentication. It kills with SIGKILL at random moments: all processes of a node, the SuperLink, or `fpld aggregator`.
Nodes and aggregator are started again at once, as systemd does; the aggregator starts the SuperLink itself. It has
healed when the node that was killed, or else every node, has got a message of the run again. Seconds count from the
restart, for the SuperLink from the kill. Trace and student are compared with those of an undisturbed run, bit for bit.
"""
OVERHEAD = """\
## What a round costs over Flower

`python -m benchmarks.flower_overhead` puts a relay before each node of a real deployment and counts bytes on the wire,
TLS included. Seconds are those of a round beyond the slowest node's work. Medians over rounds, the first one left out.
"""
ATTACKS = """\
## Attacks on a real deployment

`python -m benchmarks.deployment_attacks` starts a SuperLink with TLS and node authentication, an aggregator and nodes
on loopback, as [Deploy](deploy.md) does. One registered node attacks in every round; others try to get in. What a run
could not judge is left out.
"""


def measured() -> list[str]:
    """Return the sections with figures, which are kept in docs/results/reliability.json with their commands."""
    found = json.loads(RESULTS.read_text())
    parts = ["", FUZZ, _ran(found["fuzz"]), "| tried | number |", "|---|---|"]
    parts += [f"| {name} | {count:,} |" for name, count in found["fuzz"]["counts"].items()]
    parts += [f"| **failures** | **{found['fuzz']['failures']}** |", "", KILLS]
    for name in ("kills", "workers", "damage"):
        if name in found:
            parts += [f"- {_ran(found[name])} **{found[name]['result']}**"]
    if "lab" in found:
        parts += ["", LAB, _ran(found["lab"]), *_table(found["lab"]["rows"]), "", f"**{found['lab']['result']}**"]
    for number, ran in enumerate(found.get("overhead", [])):
        parts += ["", *([] if number else [OVERHEAD]), _ran(ran), *_table(ran["rows"]), "", f"**{ran['result']}**"]
    if "attacks" in found:
        parts += ["", ATTACKS, _ran(found["attacks"]), "| attack | what happened | |", "|---|---|---|"]
        parts += [
            f"| {row['attack']} | `{row['happened'].replace('|', '/')}` | {'held' if row['held'] else '**not held**'} |"
            for row in found["attacks"]["rows"]
            if not row["happened"].startswith("not judged")
        ]
    return parts


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows as a table, with the names of their values above it."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _ran(found: dict[str, Any]) -> str:
    line = f"`{found['command']}` at {found['commit']} ({found['where']}):"
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    number = 0
    for name, rows in PARTS.items():
        parts += [f"\n## {name}\n", "| | fault | guarantee | tests |", "|---|---|---|---|"]
        for row in rows:
            number += 1
            tests = "<br>".join(f"`{test}`" for test in row.tests)
            promise = f"{row.promise}. Not tested: {row.without}" if row.without else row.promise
            parts.append(f"| {number} | {row.fault} | {promise} | {tests} |")
    return "\n".join([*parts, *measured()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
