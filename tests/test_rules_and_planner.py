"""What the rules let pass, the planner can order, and the checker agrees."""

from __future__ import annotations

from typing import get_args

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hocket.config import (
    Config,
    DataOverlap,
    ExpertOverlap,
    MeshConfig,
    ModelConfig,
    OverlapConfig,
    PipelineOverlap,
    PlanConfig,
    Strategy,
    TrainConfig,
)
from hocket.planning import program_of
from hocket.program.check import assert_valid
from hocket.resolve import resolve


@st.composite
def configs(draw: st.DrawFn) -> Config:
    pp, chunks, ep = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    layers = draw(st.integers(pp * chunks, pp * chunks + 5))
    microbatches = draw(st.integers(1, 9))
    group = draw(st.sampled_from([0, 0, *range(pp, microbatches + 1)]))
    return Config(
        model=ModelConfig(
            layers=layers,
            experts=4 if ep > 1 else draw(st.sampled_from([0, 4])),
            dense_layers=tuple(draw(st.sets(st.integers(0, layers - 1), max_size=3))),
            tied=draw(st.booleans()) if pp * chunks == 1 else False,
        ),
        mesh=MeshConfig(pp=pp, dp=ep * draw(st.sampled_from([1, 2])), ep=ep),
        plan=PlanConfig(
            order=draw(
                st.sampled_from(["auto", "auto", "sequential", "1f1b", "interleaved", "zb_h1", "zb_v", "merged_v"])
            ),
            chunks=chunks,
            group=group,
            layer_order=draw(st.sampled_from(["literature", "early_release", "wgrad_last"])),
        ),
        overlap=OverlapConfig(
            dp=DataOverlap(
                strategy=draw(st.sampled_from(get_args(Strategy))),
                prefetch=draw(st.integers(0, 3)),
            ),
            pp=PipelineOverlap(
                defer_layers=draw(st.sampled_from(["auto", -1, 0, 1, 2, 3, "attn", "attn:2"])),
            ),
            ep=ExpertOverlap(merge=draw(st.sampled_from(["auto", "on", "off"]))),
            defer_wgrad=draw(st.sampled_from(["auto", "on", "off"])),
        ),
        train=TrainConfig(microbatches=microbatches),
    )


@settings(max_examples=50, deadline=None)
@given(configs())
def test_what_the_rules_let_pass_has_a_valid_program(config):
    try:
        resolved = resolve(config)
    except ValueError:
        reject()  # about one in three
    assert_valid(program_of(resolved))
