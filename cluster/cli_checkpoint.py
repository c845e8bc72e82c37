"""The commands that look at checkpoints and make them: `inspect` and `make-checkpoint`. Arguments in, exit codes out."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_runtime.synthetic_config import MODEL_SIZES, model_fields, token_fields
from glm_runtime.weight_scheme import WeightScheme
from kv_transfer.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SCHEMES = tuple(scheme.value for scheme in WeightScheme)
DEFAULT_SHARD_GB = 5.0
GB = 1_000_000_000


def add_checkpoint_commands(commands: "Commands") -> None:
    """Add the parsers; each sets `run`, which takes the parsed options and returns the exit code."""
    inspect = commands.add_parser("inspect", help="show a checkpoint's layers, tensors, cache formats and how many tokens GPUs hold")
    inspect.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a directory with config.json, with or without weights")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.add_argument("--weights", choices=SCHEMES, default="fp8", help="weights that GPU capacity is computed for (default fp8)")
    inspect.add_argument("--cache-format", metavar="MLA+INDEX", help="cache of the same (default fp8_ds_mla+fp8 where it fits)")
    inspect.add_argument("--gpus", type=int, metavar="N", help="GPUs of a group (default 8, or as many as the model can be split over)")
    inspect.set_defaults(run=_inspect)

    make = commands.add_parser(
        "make-checkpoint",
        help="write a random checkpoint of any size, or an existing one in another format",
        description="Write a random checkpoint with GLM-5.3's pattern (dense layers, full and shared indexers, an MTP layer), or with "
        "--from an existing one in another format. Sharded, with an index; the same seed gives the same bytes.",
    )
    make.add_argument("directory", type=Path, metavar="DIR", help="where to write; must hold no weights yet")
    make.add_argument("--weights", choices=SCHEMES, default="bf16", help="format of the weights (default bf16)")
    make.add_argument("--size", choices=tuple(MODEL_SIZES), help="starting point of the model's dimensions (default small)")
    make.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="changes", help="change a field of config.json")
    make.add_argument("--seed", type=int, help="of the random weights (default 0)")
    make.add_argument("--tokenizer", type=Path, metavar="DIR", help="checkpoint to take the tokenizer from (default: the shipped one)")
    make.add_argument("--from", type=Path, metavar="CHECKPOINT", dest="source", help="convert this checkpoint instead")
    make.add_argument("--shard-gb", type=float, default=DEFAULT_SHARD_GB, metavar="GB", help="most bytes of one file (default 5)")
    make.add_argument("--config-only", action="store_true", help="write config.json and the tokenizer, no weights")
    make.set_defaults(run=_make_checkpoint)


def _inspect(options: argparse.Namespace) -> int:
    from cluster.checkpoint_report import describe_checkpoint, render_report

    if options.gpus is not None and options.gpus < 1:
        raise ConfigError(f"is {options.gpus}; expected at least 1", path="--gpus")
    report = describe_checkpoint(
        options.checkpoint, scheme=WeightScheme(options.weights), num_gpus=options.gpus, cache_format=options.cache_format
    )
    print(json.dumps(report, indent=1) if options.json else render_report(report))
    return 0


def _make_checkpoint(options: argparse.Namespace) -> int:
    from cluster.config import SHIPPED_CHECKPOINT
    from cluster.terminal import progress_bar
    from glm_runtime.checkpoint import check_checkpoint
    from glm_runtime.synthetic import convert_checkpoint, make_checkpoint, write_config

    scheme, max_shard_bytes = WeightScheme(options.weights), int(options.shard_gb * GB)
    if max_shard_bytes <= 0:
        raise ConfigError(f"is {options.shard_gb:g}; expected more than 0", path="--shard-gb")
    if options.source is not None:
        _refuse_with_from(options)
        with progress_bar("converting parameters") as report:
            convert_checkpoint(options.source, options.directory, scheme, max_shard_bytes=max_shard_bytes, on_progress=report)
    else:
        tokenizer_dir = options.tokenizer or SHIPPED_CHECKPOINT
        fields = model_fields(options.size or "small", token_fields(tokenizer_dir), dict(map(_parse_change, options.changes)))
        if options.config_only:
            write_config(options.directory, fields, scheme, tokenizer_dir)
            print(f"wrote {options.directory}: config.json and tokenizer")
            return 0
        with progress_bar("writing parameters") as report:
            make_checkpoint(
                options.directory,
                fields,
                scheme,
                seed=options.seed or 0,
                tokenizer_dir=tokenizer_dir,
                max_shard_bytes=max_shard_bytes,
                on_progress=report,
            )
    check_checkpoint(options.directory)
    files = sorted(options.directory.glob("*.safetensors"))
    print(f"wrote {options.directory}: {sum(file.stat().st_size for file in files) / GB:.2f} GB in {len(files)} files")
    return 0


def _refuse_with_from(options: argparse.Namespace) -> None:
    """What a conversion takes from its source cannot be given beside it."""
    given = {
        "--size": options.size,
        "--set": options.changes,
        "--seed": options.seed,
        "--tokenizer": options.tokenizer,
        "--config-only": options.config_only,
    }
    if contradicting := [flag for flag, value in given.items() if value]:
        raise ConfigError("cannot be given with --from: the source decides", path=contradicting[0])


def _parse_change(text: str) -> tuple[str, Any]:
    """FIELD=VALUE, the value as JSON where it is JSON, else as text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"is {text!r}; expected FIELD=VALUE", path="--set")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
