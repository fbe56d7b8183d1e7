"""The words of the field: the glossary leads to files that are there, and retired words stay away.

A retired word may come back neither as the name of a file, a class, a function, an argument or an attribute, nor in a
heading of the docs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lmworks"
GLOSSARY = ROOT / "docs" / "glossary.md"
# Word → what is said instead.
RETIRED = {
    # parallel, train, checkpoint, record, data, model
    "Laid": "ParallelModel",
    "lay_out": "parallelize",
    "laid": "parallel_model",
    "Splits": "ShardingPlan",
    "meeting": "rendezvous",
    "board": "store_mailbox",
    "holdings": "rank_memory",
    "from_lead": "run_on_rank_zero",
    "is_lead": "is_rank_zero",
    "Onlooker": "RankMonitor",
    "leave_words": "post_error",
    "find_words": "wait_for_error",
    "rebuilt": "remote_error",
    "Elsewhere": "RemoteRankError",
    "Alone": "SingleRank",
    "look_ahead": "launch_next",
    "stands_alone": "is_sync_point",
    "Passed": "PassResult",
    "face": "BadStepRecovery",
    "remedy": "skip_or_lower_lr",
    "Trouble": "HealthIssue",
    "NotTaken": "StepRejected",
    "were_wrong": "faulty_ranks",
    "odd_ones": "find_outliers",
    "everywhere": "all_gather_object",
    "Detours": "SkippedBatches",
    "over_started": "fit_to_world_size",
    "who_runs": "layout_fields",
    "Saving": "CheckpointManager",
    "take_hold": "lock_folder",
    "pass_by": "skip_batches",
    "stop_asked": "stop_signal",
    "Holdings": "RankMemory",
    "Refusals": "RefusalLog",
    "NeverMet": "RendezvousTimeout",
    "MailboxGone": "StoreUnavailable",
    "Beat": "Heartbeat",
    "go_around": "ring_forward",
    "lonely": "has_no_replicas",
    "OneHeadLinear": "ReplicatedKVLinear",
    "VocabEmbedding": "VocabParallelEmbedding",
    "VocabLoss": "VocabParallelCrossEntropy",
    "cut_ends": "shard_embedding_and_head",
    "enter_narrow": "enter_in_autocast_dtype",
    "take_low": "take_low_bits",
    "visit_here": "dispatch_locally",
    "sequence_total": "sum_over_sequence",
    "PartStage": "MicroBatchStage",
    "start_moments": "init_moments",
    "join_sequences": "sum_balance_loss_over_cp",
    "PARTLY": "SELECTIVE_POLICIES",
    "keep_dear": "save_expensive",
    "KeepAttention": "SaveAttention",
    "Keeping": "PolicyContext",
    "choose_recompute": "apply_activation_checkpointing",
    "refuse_oversized": "check_fits_memory",
    "refuse_unwritable": "check_writable",
    "refuse_unknown": "check_known_keys",
    "refuse_beyond_all": "check_dimensions",
    "refuse_surplus": "check_unused_tensors",
    "in_lanes": "upload_in_threads",
    "make_room": "to_empty",
    "in_region": "in_tp_region",
    "visit_elsewhere": "dispatch_tokens",
    "still_flying": "in_flight",
    "UNSEEN": "UNKNOWN",
    "Background": "AsyncSaver",
    "Want": "ReadRange",
    "finder": "tensor_lookup",
    "nameless_file": "anonymous_file",
    "vouched": "read_committed",
    "Copied": "CopyResult",
    "look_at_leftover": "inspect_leftover",
    "in_question": "is_checkpoint_folder",
    "life": "heartbeat",
    "Courier": "CopyStream",
    "Slab": "HostBuffer",
    "Loan": "BufferLease",
    "Parcel": "OffloadedStorage",
    "Visit": "BlockPass",
    "UnderWay": "PendingCopies",
    "may_go": "is_offloadable",
    "let_go": "release_finished",
    "made_of_a_leaf": "is_cast_of_leaf",
    "refuse_taken": "check_unused",
    "refuse_others": "check_output_folder",
    "refuse_nonempty": "check_empty",
    "refuse_vocabulary": "check_vocabulary",
    "refuse_cut": "check_not_truncated",
    "plain_panics": "convert_panics",
    "leave_signals_to_trainer": "ignore_signals_in_worker",
    # engine, kernels
    "picked": "step_output",
    "Summed": "RowParallelLinear",
    "go_on": "schedule_running",
    "let_in": "admit_waiting",
    "make_way": "preempt_for",
    "rehearse": "compile_kernels",
    "rehearsal": "warm_up_kernels",
    "check_wishes": "check_params",
    "use_guesses": "trim_draft_tokens",
    "lacks_a_block": "needs_block",
    "nobodys": "padding_buffer",
    "frame_with_prompts": "mixed_bucket_for",
    "decoding_frame": "decode_bucket",
    "worth_recording": "prefill_buckets",
    "record_no_prompts": "drop_prefill_graphs",
    "tell_nobody": "ignore_result",
    "sent_home": "to_host",
    "unpickable": "no_token_error",
    "unfollowable": "grammar_error",
    "last_words": "reply",
    "draw_guess": "sample_draft_token",
    "least_scores": "score_thresholds",
    "after_interrupts": "defer_interrupts",
    "kept_of": "linear_shards",
    "torn_layer": "indivisible_int4_layer",
    "way_of": "pick_algorithm",
    "WAYS": "ALGORITHMS",
    "by_sigmoid": "sigmoid_gelu",
    "wishes": "preferences",
    "pick_alone": "pick_unless_compiling",
    "points_of": "measured_points",
    "doublings": "log2_distance",
    "cast_turned": "cast_transposed",
    "shared_out": "launch_grid or split_buffers",
    "share_out": "num_splits",
    "scaled_mm_takes": "scaled_mm_supports",
    "between_one_another": "interleave",
    "refuse_unfit": "check_quantizable",
    "refuse_unknown_source": "check_source",
    "refuse_too_large": "check_host_memory",
    "speaks": "is_text",
    "fixed_linear": "batch_invariant_linear",
    "fixed_rows": "launch_batch_invariant",
    "small_linear": "decode_linear",
    "losses_once": "one_pass_losses",
    "LEAST_GROUP": "INT4_MIN_GROUP",
    "every_fourth": "deinterleave_4",
    "UNCOUNTED": "IGNORED",
    "BlockPool": "BlockManager",
    "set_fixed": "set_batch_invariant",
    "launches_early": "supports_pdl",
    "quantized_outline": "quantized_meta_model",
    "Compilers": "CompileExecutor",
    "third_half": "extra_random_bits",
    "has_products": "has_fp8_matmul",
    "walk_keys": "accumulate_dq",
    "walk_queries": "accumulate_dk_dv",
    "OuterSum": "WeightGradient",
    "into_mean": "one_minus_beta1",
    "GRADED": "WITH_GRAD",
    "rotate_both": "rotate_qk",
    "normed_and_rotated": "norm_and_rope",
    "evens_and_odds": "deinterleave",
    "quantised": "quantized",
    "describing": "reading_description",
    "whole_file": "reading_safetensors",
    # serve, cli, launch
    "stop_with_starter": "die_with_parent",
    "leave_word": "write_error_file",
    "run_to_the_end": "run_trainer",
    "write_as_it_comes": "stream_answer",
    "handing_on": "trap_signal",
    "waiting_for": "wait_for_child",
    "read_ahead": "prefetch_weights",
    "peoples_text": "plain_text",
    "Refusal": "APIError",
    "refusal_of": "to_api_error",
    "Speech": "PromptProcessor",
    "Wire": "SocketChannel or TransportProxy",
    "Patience": "StallTimeouts",
    "Box": "EventQueue",
    "Door": "RequestMiddleware",
    "Gate": "RateLimiter",
    "Passing": "ProxyRequest",
    "hang_up": "close_gracefully",
    "hear": "handle_message",
    "carry_out": "run_pending",
    "openai_answers": "response_bodies",
    "of_engine": "engine_health",
    "text_endpoint": "app.handle_request",
    "no_room": "no_layout_message",
    "show_list": "print_faults",
    # plan, spec
    "RankShare": "RankWeights",
    "StageActivations": "Activations",
    "budget_of": "run_budget",
    "resident_shapes": "rank_weights",
    "Way": "PassCost",
    "Weigher": "Calibrated",
    "Bare": "Uncalibrated",
    "Wish": "ClusterRequest",
    "Busiest": "SlowestRank",
    "Here": "RankContext",
    "keepers": "selective_ops",
    "made_again": "rematerialized",
    "wide_ends": "fp32_head",
    "stand_in": "wgrad_placeholder",
    "held_back": "delayed_reduction",
    "kept_in": "with_precision",
    "as_it_ran": "as_measured",
    "sent_away": "with_offload",
    "unbeaten": "pareto_front_rows",
    "kept_by": "met_by",
    # bench, prove, report, diagnose
    "strike": "fault_injection",
    "struck": "injected",
    "be_rank": "run_rank",
    "broken_promise": "exit_save_problem",
    "straight_folder": "reference_folder",
    "take_turns": "time_interleaved_steps",
    "Ceilings": "PeakRates",
    "watched_power": "monitor_power",
    "power_words": "power_text",
    "drawn_on": "weights_on_device",
    "foretold": "predict_here",
    "Shot": "TimedRequest",
    "RankNow": "RankState",
    "busy_words": "busy_note",
    # align, sandbox, sweep, tune, scaling, curate
    "HostRest": "HostOffload",
    "with_signal": "informative_groups",
    "set_by_token": "set_token_values",
    "mean_or_share": "batch_mean",
    "LOST_S": "HEARTBEAT_TIMEOUT_S",
    "until_it_ends": "wait_for_exit",
    "become_program": "run_confined",
    "become_trial": "set_up_child",
    "remove_half_made": "remove_incomplete",
    "what_is_missing": "missing_resources",
    "Look": "OnPoll",
    "Chosen": "Recommended",
    "SettingLaw": "HyperparameterLaw",
    "fit_setting": "fit_hyperparameter_law",
    "doubts": "fit_warnings",
    "telling": "is_distinctive",
    "telling_hits": "distinctive_hits",
    "two_loops": "two_loop_recursion",
}
# What somebody who knows the field greps for.
SOUGHT = (
    "throughput", "continuous batching", "activation checkpointing", "SLO", "prefill", "draft tokens", "sharding plan",
    "rendezvous", "preflight", "goodput", "optimizer state", "all-gather",
)  # fmt: skip


def identifiers(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def retired_words(path: Path) -> dict[str, str]:
    found = RETIRED.keys() & {path.stem, *re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    names = {path.stem, *identifiers(path)} if found else set()  # parsed only where comments are to be told from names
    return {word: RETIRED[word] for word in sorted(found & names)}


def test_retired_words_stay_away() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 500
    assert not {path.relative_to(SOURCE).as_posix(): found for path in paths if (found := retired_words(path))}


@pytest.mark.parametrize(
    "text",
    ["class Laid: ...", "def f(*, Laid=1): ...", "def f():\n    x.Laid = 1", "async def Laid(): ...", "Laid = 1"],
)
def test_a_retired_word_is_found(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "module.py").write_text(text, encoding="utf-8")
    assert retired_words(path) == {"Laid": "ParallelModel"}


def test_headings_use_the_words_of_the_field() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert not RETIRED.keys() & set(re.findall(r"\w+", heading)), f"{page.name}: {heading}"


def test_the_glossary_leads_to_files() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    places = {term: re.findall(r"`([\w/]+\.py)`", where) for term, where in rows if where.strip() != "where"}
    missing = {
        term: paths for term, paths in places.items() if not paths or not all((SOURCE / p).is_file() for p in paths)
    }
    assert len(places) > 50 and not {term: paths for term, paths in missing.items() if term != "---"}


@pytest.mark.parametrize("term", SOUGHT)
def test_a_term_that_is_sought_is_in_glossary_and_code(term: str) -> None:
    """In the text of a module that the glossary names, with spaces or underscores."""
    (row,) = re.findall(rf"^\| [^|]*{re.escape(term)}[^|]* \|.*$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [(SOURCE / path).read_text(encoding="utf-8") + path for path in re.findall(r"`([\w/]+\.py)`", row)]
    assert any(re.search(term.replace(" ", "[ _]"), text, re.IGNORECASE) for text in texts), row
