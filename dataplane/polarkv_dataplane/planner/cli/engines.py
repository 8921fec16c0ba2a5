"""Options that say which engines compute a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from polarkv_client.calibration import read_calibration
from polarkv_client.cli.common import Finite
from polarkv_client.cli.trace import Request
from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.shapes import shape
from polarkv_dataplane.planner.sim.comparison import MOST_ENGINES, engines_for
from polarkv_dataplane.planner.sim.scenario import GPU_TFLOPS, Engines


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--engines``, ``--gpu``, ``--gpus``, ``--gpu-utilization``, ``--calibration``."""
    for option in (
        click.option("--calibration", type=click.Path(path_type=Path), metavar="FILE", help="Measured rates."),
        click.option("--gpu-utilization", default=0.5, show_default=True, type=Finite(0.001, 1),
                     help="Share of a GPU's peak that prefill reaches."),
        click.option("--gpus", default=8, show_default=True, type=click.IntRange(1, 1024), help="GPUs of an engine."),
        click.option("--gpu", type=click.Choice(list(GPU_TFLOPS)), default="h20", show_default=True,
                     help="Of the engines."),
        click.option("--engines", type=click.IntRange(1, MOST_ENGINES),
                     help="Engines. Default: 70 % busy without a cache."),
    ):  # fmt: skip
        command = option(command)
    return command


def engines_of(requests: Sequence[Request], asked: dict[str, Any]) -> Engines:
    """The engines that the options ask for.

    Raises:
        ConfigurationError: nothing says how fast they are.
    """
    given: dict[str, Any] = {"gpus": asked["gpus"], "tflops": GPU_TFLOPS[asked["gpu"]]}
    given["utilization"] = asked["gpu_utilization"]
    if asked["calibration"] is not None:
        calibration = read_calibration(asked["calibration"])
        given["prefill_tokens_per_s"] = calibration.prefill_tokens_per_s
        if calibration.memory_bytes_per_s:  # a client's; each rank has one
            given["network_bytes_per_s"] = calibration.memory_bytes_per_s * asked["tensor_parallel"]
        if not given["prefill_tokens_per_s"]:
            fix = "has no prefill rate: measure it with 'polarkv calibrate --engine URL', or say it with --prefill"
            raise ConfigurationError("--calibration", str(asked["calibration"]), fix)
    if asked["model"]:
        engines = Engines.of(shape(asked["model"]), asked["engines"] or 1, **given)
    elif given.get("prefill_tokens_per_s"):
        engines = Engines(asked["engines"] or 1, **given)
    else:
        raise ConfigurationError("--model", None, "say --model, or --calibration with a measured prefill rate")
    return engines if asked["engines"] else engines_for(requests, engines)
