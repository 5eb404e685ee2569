"""Roles of ranks, and their places in a cluster: one bundle of a placement group for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from pycoll import _core
from pycoll.arguments import real_number, shown, whole_number
from pycoll.errors import TimeoutError, UsageError

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks that do the same, such as workers or servers.

    Attributes:
        count: Number of ranks.
        num_cpus: CPUs that Ray reserves for each rank.
        num_gpus: GPUs that Ray reserves for each rank, and the only ones that it sees.
        resources: Other resources of Ray for each rank, by name.
    """

    count: int
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """The resources of one rank."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in named.items() if amount}


def roles_of(ranks: int | Role | Mapping[str, int | Role]) -> dict[str, Role]:
    """Returns the roles by name, in the order of their ranks.

    Raises:
        UsageError: A number is invalid, or there are too many ranks.
    """
    given = ranks if isinstance(ranks, Mapping) else {"rank": ranks}
    if not given:
        raise UsageError("start: there are no roles, expected at least one")
    roles = {}
    for name, role in given.items():
        if not isinstance(role, Role):
            role = Role(whole_number(role, f"start: ranks of role {name!r}", 1, _core.max_ranks))
        whole_number(role.count, f"start: count of role {name!r}", 1, _core.max_ranks)
        for resource, amount in role.bundle().items():
            real_number(amount, f"start: {resource} of role {name!r}")
        if not role.bundle():
            raise UsageError(f"start: role {name!r} needs no resources, expected some CPUs")
        roles[str(name)] = role
    total = sum(role.count for role in roles.values())
    whole_number(total, "start: number of ranks", 1, _core.max_ranks)
    return roles


def place(roles: Mapping[str, Role], strategy: str, timeout_s: float) -> Any:
    """Reserves the resources of all ranks; returns the placement group, a bundle for each rank.

    Raises:
        UsageError: The strategy is unknown.
        TimeoutError: The cluster has had no room before the deadline.
    """
    if strategy not in STRATEGIES:
        raise UsageError(
            f"start: strategy is {shown(strategy)}, expected one of {', '.join(STRATEGIES)}"
        )
    bundles = [role.bundle() for role in roles.values() for _ in range(role.count)]
    group = placement_group(bundles, strategy=strategy)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    needed: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0) + amount
    raise TimeoutError(
        f"start: {len(bundles)} ranks found no place within {timeout_s:g} s by {strategy}: they "
        f"need {_listed(needed)}; free on {len(ray.nodes())} nodes: "
        f"{_listed({name: ray.available_resources().get(name, 0) for name in needed})}"
    )


def bundles_by_node(group: Any, roles: Mapping[str, Role]) -> list[int]:
    """The bundle of each rank, so that the ranks of a role on one node are consecutive.

    Schedules for several hosts need consecutive ranks on each host (docs/hosts.md).
    """
    nodes = placement_group_table(group)["bundles_to_node_id"]
    ordered: list[int] = []
    for role in roles.values():
        of_role = range(len(ordered), len(ordered) + role.count)
        ordered += sorted(of_role, key=lambda bundle: (nodes[bundle], bundle))
    return ordered


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


__all__ = ["STRATEGIES", "Role", "bundles_by_node", "place", "roles_of"]
