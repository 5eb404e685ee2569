"""Module that torch loads at the end of `import torch` (entry point group `torch.backends`).

It is outside the package and imports nothing of it, so that programs which do not use pycoll pay
nothing. pycoll is imported when a process group needs the backend.
"""


def register() -> None:
    """Registers the backend of `init_process_group("pycoll")` with torch, once."""
    from torch import distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "PYCOLL"):
        # A list: torch would treat each letter of a string as a device.
        dist.Backend.register_backend(
            "pycoll", _make_backend, extended_api=True, devices=["cpu", "cuda"]
        )
        _meet_by_launcher()


def _meet_by_launcher() -> None:
    """Adds a rendezvous for mpiexec and srun, which torch does not support, to env://."""
    import os
    import sys

    # Not `from torch.distributed`: there, a function has the module's name. If another version of
    # torch keeps its handlers elsewhere, an init_method or a store is needed, as without pycoll.
    module = sys.modules.get("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", {})
    if "env" not in handlers:
        return
    of_torch = handlers["env"]

    def env_handler(url, **kwargs):  # type: ignore[no-untyped-def]
        launched = any(
            name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")
        )
        if "RANK" in os.environ or "rank=" in url or not launched:
            return of_torch(url, **kwargs)
        from torch.distributed import TCPStore

        from pycoll.rendezvous.torch_rendezvous import meet

        return meet(TCPStore, **kwargs)

    handlers["env"] = env_handler


def _make_backend(given, options):  # type: ignore[no-untyped-def]
    import pycoll.torch

    return pycoll.torch.make_backend(given, options)
