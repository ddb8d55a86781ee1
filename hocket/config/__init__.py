"""All settings, as frozen dataclasses. A run is one `Config`. A recipe is a function that returns a `Config`.

Each section has its own file in this folder, with its fields and the rules between them. Rules that need the step's
program are in `hocket/rules.py`. `rule.py` defines the elements of sections, `schema.py` queries settings, and
`load.py` reads files and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.config.data import BYTE_VOCAB as BYTE_VOCAB
from hocket.config.data import BYTES as BYTES
from hocket.config.data import DataConfig as DataConfig
from hocket.config.hardware import HardwareConfig as HardwareConfig
from hocket.config.mesh import MeshConfig as MeshConfig
from hocket.config.mesh import Purpose as Purpose
from hocket.config.mesh import Steps as Steps
from hocket.config.mesh import Strategy as Strategy
from hocket.config.model import PLAIN as PLAIN
from hocket.config.model import ModelConfig as ModelConfig
from hocket.config.model import RopeConfig as RopeConfig
from hocket.config.model import RopeKind as RopeKind
from hocket.config.network import NetworkConfig as NetworkConfig
from hocket.config.optimizer import OptimizerConfig as OptimizerConfig
from hocket.config.overlap import DataOverlap as DataOverlap
from hocket.config.overlap import ExpertOverlap as ExpertOverlap
from hocket.config.overlap import OverlapConfig as OverlapConfig
from hocket.config.overlap import PipelineOverlap as PipelineOverlap
from hocket.config.overlap import TensorOverlap as TensorOverlap
from hocket.config.overlap import Update as Update
from hocket.config.plan import PlanConfig as PlanConfig
from hocket.config.precision import PrecisionConfig as PrecisionConfig
from hocket.config.rule import Switch as Switch
from hocket.config.run import RunConfig as RunConfig
from hocket.config.train import COPIED as COPIED
from hocket.config.train import LABELS as LABELS
from hocket.config.train import TrainConfig as TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the model."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Arrangement of the ranks."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """GPUs that predictions assume."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Network between hosts that predictions assume."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Order of one step."""
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """How communication is hidden."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length, batch, optimizer and machinery."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Which weights the optimizer updates, and how."""
    run: RunConfig = field(default_factory=RunConfig)
    """Name and folder."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that one rank holds between layers."""
        return self.train.sequences * self.data.sequence_length // (self.mesh.cp * self.mesh.tp)

    @property
    def stages(self) -> int:
        """Virtual pipeline stages."""
        return self.mesh.pp * self.plan.chunks

    @property
    def rows_travel(self) -> bool:
        """Whether tokens are sent to experts on other ranks."""
        return self.model.has_experts and self.mesh.ep > 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the compute dtype, which must not be `auto`."""
        return 2 if self.precision.dtype == "bf16" else 4

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element of a weight gradient in communication."""
        return {"bf16": 2, "fp32": 4}.get(self.precision.wire, self.element_bytes)
