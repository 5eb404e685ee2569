"""A backward in two parts: the gradients of inputs at once, those of weights later.

The graph of a stage has nodes from which an input can be reached (the trunk) and nodes from which
only weights can be reached. For nodes of the second kind that hang on the trunk, the later part
needs only the gradient that arrives at the trunk's node: the first part records it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

Grads = list[torch.Tensor | None]


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    parameters: Iterable[torch.Tensor],
) -> tuple[Grads, Callable[[], None]]:
    """Returns the inputs' gradients, and a function that adds the parameters' ones to `.grad`.

    Args:
        outputs: Outputs of the stage; those without a graph are skipped.
        gradients: Gradient of each output; None for a scalar loss.
        inputs: Leaves that require gradients.
        parameters: Parameters of the stage.

    Returns:
        The gradient of each input (None: unused), and the function for the parameters' gradients.

    Cost: both parts together take the time of one backward plus a few microseconds per weight. The
    tensors saved by the graph are kept until the second part is done.
    """
    live = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    wanted = [p for p in parameters if p.requires_grad]
    if not live:
        return [None] * len(inputs), lambda: None
    tensors, given = [o for o, _ in live], [g for _, g in live]
    if not inputs:
        return [], lambda: _whole(tensors, given, wanted)
    roots = [_node(tensor) for tensor in tensors]
    parents = _parents(roots)
    trunk = _above([_node(tensor) for tensor in inputs], parents, set())[0]
    groups = _groups(wanted, roots, trunk, parents)
    noted: dict[Node, tuple[Any, ...]] = {}

    def note(node: Node) -> Callable[[tuple[Any, ...]], None]:
        return lambda arriving: noted.__setitem__(node, arriving)

    # Roots beside the trunk need no note: no gradient of an input passes there.
    hooks = [node.register_prehook(note(node)) for nodes, _ in groups for node in nodes & trunk]
    try:
        found = torch.autograd.grad(
            tensors, list(inputs), given, retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    for tensor, gradient, root in zip(tensors, given, roots, strict=True):
        if root not in trunk:
            arriving = list(noted.get(root, ()))
            arriving += [None] * (tensor.output_nr + 1 - len(arriving))
            arriving[tensor.output_nr] = torch.ones_like(tensor) if gradient is None else gradient
            noted[root] = tuple(arriving)
    return list(found), lambda: _weights(groups, noted)


def _whole(outputs: list[torch.Tensor], gradients: Grads, parameters: list[torch.Tensor]) -> None:
    """Runs the whole backward: without inputs there is no trunk."""
    if parameters:
        torch.autograd.backward(outputs, gradients, inputs=parameters)


def _weights(
    groups: list[tuple[set[Node], list[torch.Tensor]]], noted: dict[Node, tuple[Any, ...]]
) -> None:
    for nodes, parameters in groups:
        edges, gradients, hooks = [], [], []
        for node in nodes:
            arrived = noted.get(node, ())
            for i, gradient in enumerate(arrived):
                if gradient is not None:
                    edges.append(GradientEdge(node, i))
                    gradients.append(gradient)
            if len(nodes) > 1:
                # One node may lie below another, whose note includes the gradient that flows down.
                hooks.append(node.register_prehook(lambda _, noted=arrived: noted))
        try:
            if edges:
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=parameters)
        finally:
            for hook in hooks:
                hook.remove()
    groups.clear()
    noted.clear()


def _node(tensor: torch.Tensor) -> Node:
    """The node that makes a tensor; for a leaf, the node that accumulates its gradient."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    with torch.enable_grad():
        view = tensor.view_as(tensor).grad_fn  # its maker leads to the leaf's node
    node = view.next_functions[0][0] if view is not None else None
    assert node is not None
    return node


def _parents(roots: list[Node]) -> dict[Node, list[Node]]:
    """Maps every node below the roots to the nodes that pass gradients to it."""
    parents: dict[Node, list[Node]] = defaultdict(list)
    todo, seen = list(roots), set(roots)
    while todo:
        node = todo.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            parents[child].append(node)
            if child not in seen:
                seen.add(child)
                todo.append(child)
    return parents


def _above(
    start: list[Node], parents: dict[Node, list[Node]], stop: set[Node]
) -> tuple[set[Node], set[Node]]:
    """The nodes above the start up to those of `stop`, and the nodes of `stop` that are reached."""
    found, met, todo = set(start), set(), list(start)
    while todo:
        for parent in parents.get(todo.pop(), ()):
            if parent in stop:
                met.add(parent)
            elif parent not in found:
                found.add(parent)
                todo.append(parent)
    return found, met


def _groups(
    parameters: list[torch.Tensor],
    roots: list[Node],
    trunk: set[Node],
    parents: dict[Node, list[Node]],
) -> list[tuple[set[Node], list[torch.Tensor]]]:
    """Groups parameters that hang on the same trunk nodes, or on a root beside the trunk."""
    groups: list[tuple[set[Node], list[torch.Tensor]]] = []
    for parameter in parameters:
        above, nodes = _above([_node(parameter)], parents, trunk)
        nodes |= {root for root in roots if root in above}
        together = [group for group in groups if group[0] & nodes]
        groups = [group for group in groups if not group[0] & nodes]
        for group in together:
            nodes |= group[0]
        groups.append((nodes, [parameter, *(p for group in together for p in group[1])]))
    return groups


__all__ = ["backward_inputs"]
