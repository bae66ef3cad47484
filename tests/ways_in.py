"""The ways in which a model reaches torch.compile, as functions: a model in, what is compiled and called out.

A way gives (function, arguments): ``torch.compile(function)(*arguments, tokens)`` is the model on the tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

DIM, HIDDEN, VOCABULARY = 32, 64, 96

Entry = tuple[Callable[..., Tensor], tuple[Any, ...]]
Way = Callable[[nn.Module], Entry]


class Block(nn.Module):
    """One branch beside the residual: sums of two gradients are the same in any order, however the graph is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.mid = nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.mid(torch.relu(self.up(x)))))


class Model(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


WAYS: dict[str, Way] = {}
"""The model reaches the graph in one frame."""

PARTS: dict[str, Way] = {}
"""torch compiles the model in parts: each is a frame that sees a block alone."""


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def in_parts(function: Way) -> Way:
    PARTS[function.__name__] = function
    return function


# --- the model itself


@way
def itself(model: nn.Module) -> Entry:
    return model, ()


@way
def bound_forward(model: nn.Module) -> Entry:
    return model.forward, ()


@way
def bound_call(model: nn.Module) -> Entry:
    return model.__call__, ()


def with_forward(model: nn.Module, forward: Callable[..., Tensor]) -> nn.Module:
    """The model as an instance of a class with another forward."""
    model.__class__ = type("Wrapped", (type(model),), {"forward": forward})
    return model


@way
def forward_decorated_with_wraps(model: nn.Module) -> Entry:
    plain = type(model).forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return plain(*args, **kwargs)

    return with_forward(model, forward), ()


@way
def forward_decorated_without_wraps(model: nn.Module) -> Entry:
    plain = type(model).forward
    return with_forward(model, lambda *args, **kwargs: plain(*args, **kwargs)), ()


@way
def forward_replaced_by_a_method(model: nn.Module) -> Entry:
    model.forward = types.MethodType(lambda self, tokens: type(self).forward(self, tokens), model)
    return model, ()


@way
def forward_replaced_by_a_closure(model: nn.Module) -> Entry:
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    return model, ()


# --- a function that names it


@way
def closure(model: nn.Module) -> Entry:
    return lambda tokens: model(tokens), ()


MODEL: nn.Module | None = None


@way
def global_variable(model: nn.Module) -> Entry:
    global MODEL
    MODEL = model
    return lambda tokens: MODEL(tokens), ()  # type: ignore[misc]


@way
def global_of_another_file(model: nn.Module) -> Entry:
    other = types.ModuleType("ways_in_other")
    other.model = model  # type: ignore[attr-defined]
    sys.modules["ways_in_other"] = other

    def function(tokens: Tensor) -> Tensor:
        import ways_in_other

        return ways_in_other.model(tokens)

    return function, ()


@way
def default_argument(model: nn.Module) -> Entry:
    return lambda tokens, model=model: model(tokens), ()


@way
def keyword_default(model: nn.Module) -> Entry:
    def function(tokens: Tensor, *, model: nn.Module = model) -> Tensor:
        return model(tokens)

    return function, ()


@way
def partial(model: nn.Module) -> Entry:
    return functools.partial(lambda model, tokens: model(tokens), model), ()


@way
def weak_reference(model: nn.Module) -> Entry:
    reference = weakref.ref(model)
    return lambda tokens: reference()(tokens), ()  # type: ignore[misc]


@way
def its_own_pieces(model: nn.Module) -> Entry:
    """Blocks from a list of the user's, the rest from the model."""
    blocks = list(model.layers)  # type: ignore[arg-type]

    def function(model: Any, tokens: Tensor) -> Tensor:
        x = model.tok(tokens)
        for block in blocks:
            x = block(x)
        return model.lm_head(x)

    return function, (model,)


# --- a function that is handed it


@way
def argument(model: nn.Module) -> Entry:
    return lambda model, tokens: model(tokens), (model,)


@way
def starred_arguments(model: nn.Module) -> Entry:
    return lambda *args: args[0](*args[1:]), (model,)


@way
def list_argument(model: nn.Module) -> Entry:
    return lambda models, tokens: models[0](tokens), ([model],)


@way
def nested_argument(model: nn.Module) -> Entry:
    return lambda models, tokens: models["a"][1](tokens), ({"a": (1, model)},)


@way
def iterator(model: nn.Module) -> Entry:
    return lambda models, tokens: next(models)(tokens), (iter((model,)),)


Pair = collections.namedtuple("Pair", "number model")


@way
def named_tuple(model: nn.Module) -> Entry:
    return lambda pair, tokens: pair.model(tokens), (Pair(1, model),)


@dataclasses.dataclass
class Holder:
    model: Any
    number: int = 1

    def step(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.step(tokens)

    @property
    def the_model(self) -> Any:
        return self.model


@way
def dataclass(model: nn.Module) -> Entry:
    return lambda holder, tokens: holder.model(tokens), (Holder(model),)


@way
def property_of_an_object(model: nn.Module) -> Entry:
    return lambda holder, tokens: holder.the_model(tokens), (Holder(model),)


@way
def bound_method_of_another_object(model: nn.Module) -> Entry:
    return Holder(model).step, ()


@way
def callable_object(model: nn.Module) -> Entry:
    return Holder(model), ()


class Boxed(nn.Module):
    """A module that does not register the model it calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.box = [model]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.box[0](tokens)


@way
def list_in_another_module(model: nn.Module) -> Entry:
    return Boxed(model), ()


@way
def functional_call(model: nn.Module) -> Entry:
    def function(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (tokens,))

    return function, (dict(model.named_parameters()),)


# --- wrappers


@way
def compiled_block_inside(model: nn.Module) -> Entry:
    model.layers[2] = torch.compile(model.layers[2], backend="eager")  # type: ignore[index,operator]
    return model, ()


@way
def checkpointed_blocks(model: nn.Module) -> Entry:
    for index, block in enumerate(model.layers):  # type: ignore[arg-type]
        model.layers[index] = checkpoint_wrapper(block)  # type: ignore[operator,index]
    return model, ()


@way
def data_parallel(model: nn.Module) -> Entry:
    return nn.parallel.DistributedDataParallel(model), ()


@in_parts
def data_parallel_in_buckets(model: nn.Module) -> Entry:
    """Not a frame, but a graph for each bucket of gradients."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.03), ()


@in_parts
def fully_sharded(model: nn.Module) -> Entry:
    mesh = init_device_mesh("cpu", (1,))
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), ()


@way
def fully_sharded_flat(model: nn.Module) -> Entry:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")), ()


# --- graph breaks


@in_parts
def break_between_blocks(model: nn.Module) -> Entry:
    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return self.lm_head(x)

    return with_forward(model, forward), ()


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(torch.relu(self.mid(torch.relu(up))))


@in_parts
def break_in_blocks(model: nn.Module) -> Entry:
    for block in model.layers:  # type: ignore[union-attr]
        block.__class__ = Broken
    return model, ()


class BrokenWithItsWeight(Block):
    """The part after the break is handed a parameter by itself."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.mid.weight, self.mid.bias
        up = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(torch.relu(nn.functional.linear(torch.relu(up), weight, bias)))


@in_parts
def break_with_a_weight_in_hand(model: nn.Module) -> Entry:
    for block in model.layers:  # type: ignore[union-attr]
        block.__class__ = BrokenWithItsWeight
    return model, ()


@in_parts
def break_in_a_function(model: nn.Module) -> Entry:
    """No module is called that has all blocks."""

    def function(tokens: Tensor) -> Tensor:
        x = model.tok(tokens)
        for layer in model.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return model.lm_head(x)

    return function, ()


@in_parts
def break_in_a_method_of_another_object(model: nn.Module) -> Entry:
    class Trainer:
        def __init__(self, model: Any) -> None:
            self.model = model

        def step(self, tokens: Tensor) -> Tensor:
            x = self.model.tok(tokens)
            for layer in self.model.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return self.model.lm_head(x)

    return Trainer(model).step, ()
