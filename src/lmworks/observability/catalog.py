"""The list of metrics. Server and gateway export from it; docs, alert rules and the dashboard are made from it.

Names follow Prometheus' rules: base units, `_total` on counters (added by the exporter). Metrics of the engine have
vLLM's names and are exported twice, as `lmworks:NAME` and as `vllm:NAME`, so that dashboards made for vLLM work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX, VLLM_PREFIX = "lmworks:", "vllm:"

# Upper bounds in seconds, 1–2.5–5 from 1 ms to 100 s.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0,
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["server", "gateway"]
Combine = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class MetricSpec:
    name: str  # without prefix and `_total`
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""  # empty: a plain number
    process: Process = "server"
    buckets: tuple[float, ...] = ()
    engine: str = ""  # field of `engine.core.metrics.Metrics` that it is read from
    vllm: bool = False  # has a name of vLLM's
    combine: Combine = "max"  # values of a gauge that several workers of one gateway have

    @property
    def exported(self) -> str:
        """As it is registered with the Prometheus client."""
        return PREFIX + self.name

    @property
    def series(self) -> str:
        """As queries name it; a histogram's series have `_bucket`, `_sum` and `_count` behind this."""
        return self.exported + ("_total" if self.kind == "counter" else "")


def engine(name: str, kind: Kind, help: str, unit: str = "", **more: object) -> MetricSpec:
    """A metric of the engine under vLLM's name."""
    fields = {"labels": ("model_name",), "engine": name, "vllm": True, **more}
    return MetricSpec(name, kind, help, unit=unit, **fields)  # type: ignore[arg-type]


def seconds(name: str, help: str) -> MetricSpec:
    return engine(name, "histogram", help, "seconds", buckets=BUCKETS)


def tokens(name: str, help: str, buckets: tuple[float, ...] = TOKEN_BUCKETS) -> MetricSpec:
    return engine(name, "histogram", help, "tokens", buckets=buckets)


TIER = ("model_name", "tier")
ENGINE = (
    engine("num_requests_running", "gauge", "running sequences", "sequences"),
    engine("num_requests_waiting", "gauge", "waiting sequences", "sequences"),
    engine("kv_cache_usage_perc", "gauge", "share of KV blocks in use, 0 to 1", "ratio"),
    engine("prompt_tokens", "counter", "prompt tokens", "tokens"),
    engine("generation_tokens", "counter", "generated tokens", "tokens"),
    engine("prefix_cache_queries", "counter", "prompt tokens looked up in the prefix cache", "tokens"),
    engine("prefix_cache_hits", "counter", "prompt tokens found in the prefix cache", "tokens"),
    engine("external_prefix_cache_queries", "counter",
           "prompt tokens that the device did not have, looked up in the tiers below it", "tokens"),
    engine("external_prefix_cache_hits", "counter", "prompt tokens found in the tiers below the device", "tokens"),
    engine("kv_tier_hits", "counter", "blocks loaded to the device, by the tier that had them", "blocks",
           labels=TIER, vllm=False),
    engine("kv_tier_stored", "counter", "blocks stored in a tier", "blocks", labels=TIER, vllm=False),
    engine("kv_tier_errors", "counter", "blocks not stored or not used, by why", "blocks",
           labels=("model_name", "error"), vllm=False),
    engine("kv_tier_bytes", "gauge", "bytes of the blocks of a tier", "bytes", labels=TIER, vllm=False),
    engine("warm_adapters", "gauge", "1: the LoRA adapter is loaded", "", labels=("model_name", "adapter"), vllm=False),
    engine("adapter_loads", "counter", "LoRA adapters loaded from the store", "adapters", vllm=False),
    engine("num_preemptions", "counter", "sequences that were preempted and recomputed", "sequences"),
    engine("request_success", "counter", "finished sequences", "sequences", labels=("model_name", "finished_reason"),
           engine="finished"),
    seconds("time_to_first_token_seconds", "from arrival at the engine to the first token"),
    seconds("inter_token_latency_seconds", "between two tokens of a sequence"),
    seconds("request_time_per_output_token_seconds", "mean time between the tokens of a request"),
    seconds("e2e_request_latency_seconds", "from arrival to the end of the last sequence"),
    seconds("request_queue_time_seconds", "from arrival until it was scheduled"),
    seconds("request_prefill_time_seconds", "from being scheduled to the first token"),
    seconds("request_decode_time_seconds", "from the first token to the last"),
    seconds("request_inference_time_seconds", "from being scheduled to the last token"),
    tokens("request_prompt_tokens", "prompt tokens of a request"),
    tokens("request_generation_tokens", "generated tokens of a request, all answers together"),
    tokens("request_max_num_generation_tokens", "tokens of the longest answer of a request"),
    tokens("request_prefill_kv_computed_tokens", "prompt tokens of a request that no prefix cache had"),
    tokens("request_params_max_tokens", "max_tokens of a request"),
    engine("request_params_n", "histogram", "n of a request", "answers", buckets=N_BUCKETS),
    # A histogram, whatever its name says: vLLM's.
    tokens("iteration_tokens_total", "tokens of an engine step", STEP_BUCKETS),
    engine("spec_decode_num_draft_tokens", "counter", "draft tokens proposed", "tokens", engine="proposed_guesses"),
    engine("spec_decode_num_accepted_tokens", "counter", "draft tokens accepted", "tokens", engine="accepted_guesses"),
    engine("steps", "counter", "engine steps", "steps", vllm=False),
    engine("proposed_guesses", "counter", "draft tokens proposed", "tokens", vllm=False),
    engine("accepted_guesses", "counter", "draft tokens accepted", "tokens", vllm=False),
)  # fmt: skip

MODEL = ("model_name",)
GPU = ("gpu",)
SERVER = (
    MetricSpec("engine_up", "gauge", "1: the engine runs, accepts requests and advances", MODEL),
    MetricSpec("engine_stalled_seconds", "gauge", "seconds without progress while there is work", MODEL, "seconds"),
    MetricSpec("engine_restarts", "counter", "restarts of the engine process", MODEL, "restarts"),
    MetricSpec("engine_ooms", "counter", "engine processes that ended for want of memory", MODEL, "restarts"),
    MetricSpec("http_requests", "counter", "requests", ("method", "path", "status"), "requests"),
    MetricSpec("http_request_duration_seconds", "histogram", "until the last byte", ("path",), "seconds",
               buckets=BUCKETS),
    MetricSpec("gpu_utilization_ratio", "gauge", "share of the last second in which a kernel ran (NVML)", GPU, "ratio"),
    MetricSpec("gpu_power_watts", "gauge", "power draw (NVML)", GPU, "watts"),
    MetricSpec("gpu_memory_used_bytes", "gauge", "memory in use, by any process (NVML)", GPU, "bytes"),
    MetricSpec("gpu_memory_total_bytes", "gauge", "memory (NVML)", GPU, "bytes"),
    MetricSpec("tls_certificate_expiry_timestamp_seconds", "gauge", "when certificates of a file end, Unix time",
               ("file",), "seconds"),
)  # fmt: skip


def gateway(
    name: str, kind: Kind, help: str, labels: tuple[str, ...] = (), unit: str = "", combine: Combine = "max"
) -> MetricSpec:
    buckets = BUCKETS if kind == "histogram" else ()
    return MetricSpec(f"gateway_{name}", kind, help, labels, unit, "gateway", buckets, combine=combine)


WHO = ("model_name", "tenant", "tier")
PLACE = ("pool", "server")
GATEWAY = (
    gateway("requests", "counter", "requests", ("model_name", "path", "status", "tenant", "tier"), "requests"),
    gateway("requests_open", "gauge", "requests under way", unit="requests", combine="sum"),
    gateway("request_failures", "counter", "requests that ended with an error, begun streams included",
            ("model_name", "tenant", "tier", "code"), "requests"),
    gateway("try_failures", "counter", "tries that failed", ("server", "reason"), "tries"),
    gateway("retries", "counter", "tries beyond a request's first", ("model_name",), "tries"),
    gateway("migrations", "counter", "streams that another server went on with", ("model_name",), "streams"),
    gateway("hedges", "counter", "requests that a second server was asked too, by which of them began first",
            ("model_name", "winner"), "requests"),
    gateway("prefills", "counter", "tries at decode servers: remote took KV blocks of a prefill server, local computed "
            "the prompt", ("model_name", "where"), "tries"),
    gateway("rollout_share", "gauge", "share of requests that go to the candidate", ("model_name", "candidate"),
            "ratio"),
    gateway("rollout_state", "gauge", "1: the rollout's state", ("model_name", "state")),
    gateway("rollout_rollbacks", "counter", "candidates that were rolled back, by hand excluded", ("model_name",),
            "rollouts"),
    gateway("rollout_shadow_requests", "counter", "copies of requests to the candidate, by what became of them",
            ("model_name", "outcome"), "requests"),
    gateway("prompt_tokens", "counter", "prompt tokens", WHO, "tokens"),
    gateway("generation_tokens", "counter", "generated tokens", WHO, "tokens"),
    gateway("cached_tokens", "counter", "prompt tokens that servers found in their prefix caches", WHO, "tokens"),
    gateway("time_to_first_token_seconds", "histogram", "from the request to the first event of its answer", WHO,
            "seconds"),
    gateway("time_per_output_token_seconds", "histogram", "mean time between the tokens of a streamed answer", WHO,
            "seconds"),
    gateway("e2e_request_latency_seconds", "histogram", "from the request to the last byte of its answer", WHO,
            "seconds"),
    gateway("server_up", "gauge", "1: it gets requests", PLACE),
    gateway("server_requests_open", "gauge", "requests of this gateway under way", PLACE, "requests", "sum"),
    gateway("server_queue", "gauge", "requests that it has to do, as far as is known", PLACE, "requests"),
    gateway("server_kv_cache_usage_perc", "gauge", "of its KV blocks, 0 to 1", PLACE, "ratio"),
    gateway("server_time_to_first_token_seconds", "histogram", "of requests that one server answered alone", PLACE,
            "seconds"),
    gateway("server_clock_skew_seconds", "gauge", "its clock less the gateway's, by the Date of its answers", PLACE,
            "seconds"),
    gateway("slo_objective", "gauge", "share of requests that must meet the SLO", ("slo",), "ratio"),
    gateway("slo_requests", "counter", "requests that count for the SLO", ("slo", "tenant", "tier"), "requests"),
    gateway("slo_missed", "counter", "of these: missed it", ("slo", "tenant", "tier", "reason"), "requests"),
    gateway("slo_attainment", "gauge", "share of requests that met the SLO", ("slo", "window"), "ratio", "min"),
    gateway("slo_burn_rate", "gauge", "share missed over the share that may be; 1 uses the budget up exactly",
            ("slo", "window"), "ratio"),
    gateway("quality_score", "gauge", "share of its quality checks that a server passed, of the last round",
            ("model_name", "server"), "ratio", "min"),
    gateway("store_up", "gauge", "1: the store answers", ("store",), combine="min"),
    gateway("config_reload_success", "gauge", "1: the file as it is now is in use", combine="min"),
    gateway("tls_certificate_expiry_timestamp_seconds", "gauge", "when certificates of a file end, Unix time",
            ("side", "file"), "seconds", "min"),
)  # fmt: skip

METRICS = {one.name: one for one in (*ENGINE, *SERVER, *GATEWAY)}
