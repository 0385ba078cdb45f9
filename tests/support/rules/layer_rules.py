"""Import rules that hold across packages: who may import the programs, torch, and the router's memories. The table of
what each package may import is `import_rules.py`."""

from __future__ import annotations

from tests.support.rules.model_import_rules import KERNEL_OPTIONS, MODEL_FILES

# package above or beside the processes (the command line, what it starts and runs) -> its only importers
IMPORTED_FROM_ABOVE = {
    # The operator library, with its code generation and its attention: for other programs, nothing of the server.
    "moeserve.kernels.operators": set(),
    "moeserve.cli.main": {"moeserve.__main__"},
    "moeserve.launcher": {
        "moeserve.cli.main",
        "moeserve.cli.remote_worker",
        "moeserve.front.instance",
        "moeserve.front.launch",
        "moeserve.front.model_launcher",
        "moeserve.remote.host",
    },
    "moeserve.front": {"moeserve.cli.main", "moeserve.cli.models.model_needs", "moeserve.cli.several_models"},
    "moeserve.cli.bench": {"moeserve.cli.main", "moeserve.cli.plan"},
    "moeserve.cli.doctor": {"moeserve.cli.main"},
    "moeserve.cli.models": {"moeserve.cli.main"},
    "moeserve.cli.run": {"moeserve.cli.main"},
    "moeserve.cli.plan": {"moeserve.cli.main", "moeserve.cli.models"},
    "moeserve.cli.simulate": {"moeserve.cli.main", "moeserve.cli.bench"},
}
TORCH_ALLOWED = (
    "moeserve.worker",
    "moeserve.models",
    "moeserve.kernels",
    "moeserve.kv.cache",
    "moeserve.kv.cache_pages",
    "moeserve.kv.device_pages",
    "moeserve.kv.host_blocks",
    "moeserve.kv.states",
    "moeserve.visualserver.__main__",
    "moeserve.visualserver.towers",
    "moeserve.cli.doctor.probes",
    "moeserve.cli.doctor.triton_kernel",
    "moeserve.cli.models.need",
    "moeserve.cli.plan",
    "moeserve.cli.bench.engine",
)
TORCH_FORBIDDEN_WITHIN = (
    "moeserve.models.adapters",
    *MODEL_FILES,
    *KERNEL_OPTIONS,
    "moeserve.models.ranks.rank_share",
    "moeserve.models.ranks.rank_source",
)
# The only package outside the standard library that `router.core` may import: the messages consist of its types.
CORE_THIRD_PARTY = {"msgspec"}

# The memories of sequences, and the modules of them that the rest of the router may import: the protocol, the types of
# its arguments and results, and settings.
MEMORIES = ("moeserve.router.core.memory", "moeserve.router.core.tiers", "moeserve.router.core.kv_memory")
MEMORY_SEEN = {
    f"moeserve.router.core.memory.{name}" for name in ("sequence_memory", "held", "snapshot_points")
}
MEMORY_PARTS = {"windows", "states", "tiers"}  # attributes that only these modules read
