"""Which ways of cutting a worker into ranks each role may have. Pure.

Knows: what a role is for, and what is built. Does not know what a layout means (`glm_runtime/parallel/layout.py`).
"""

from collections.abc import Iterator, Mapping

from cluster.placement import Role
from glm_runtime.config import GlmConfig
from glm_runtime.parallel.layout import ParallelLayout, check_layout
from kv_transfer.errors import ConfigError

OF_THE_OTHER_ROLE: Mapping[Role, Mapping[str, str]] = {
    "prefill": {
        "dcp_size": "ranks that share a sequence's cache are for decode; prefill takes pcp_size",
        "dp_size": "data parallelism is for decode; for more prompts at once raise cluster.num_prefill_workers",
    },
    "decode": {"pcp_size": "ranks that share a prompt's rows are for prefill; decode takes dcp_size"},
}

NOT_BUILT: Mapping[str, str] = {
    "dp_size": "the cluster does not start workers that share experts yet; leave it at 1 and raise cluster.num_decode_workers",
}


def find_layout_mistakes(layouts: Mapping[Role, ParallelLayout], model: GlmConfig) -> Iterator[tuple[str, str]]:
    """The path of each field that cannot be so, and why, with what to do."""
    for role, layout in layouts.items():
        refused = [
            (name, reason)
            for reasons in (OF_THE_OTHER_ROLE[role], NOT_BUILT)
            for name, reason in reasons.items()
            if getattr(layout, name) != 1
        ]
        if refused:
            name, reason = refused[0]
            yield f"{role}.parallel.{name}", f"is {getattr(layout, name)}: {reason}"
            continue
        try:
            check_layout(layout, model, f"{role}.parallel")
        except ConfigError as error:
            yield error.path, error.reason
