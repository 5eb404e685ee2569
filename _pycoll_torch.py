"""What torch loads at the end of `import torch` (its entry point group `torch.backends`).

It stands outside the package, and imports nothing of it: programs that do not use pycoll must not
notice. The rest follows when a process group asks for the backend.
"""


def register() -> None:
    """Makes `init_process_group("pycoll")` known to torch, once."""
    from torch import distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "PYCOLL"):
        # A list: of a string torch takes the letters for devices.
        dist.Backend.register_backend(
            "pycoll", _make_backend, extended_api=True, devices=["cpu", "cuda"]
        )
        _meet_by_launcher()


def _meet_by_launcher() -> None:
    """Ranks of mpiexec and srun, for whom torch knows no rendezvous: env:// finds them, too."""
    import os
    import sys

    # Not by `from torch.distributed`: there a function has the module's name. A torch that keeps
    # its handlers elsewhere needs an init_method or a store, as without pycoll.
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
