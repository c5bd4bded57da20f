"""Sees what a model does while it runs: attention calls, attention by hand, large allocations, comparisons, steps.

Two views are combined. ``F.scaled_dot_product_attention`` and tilewise's front door are wrapped for the time of the
watch, which tells how each was called; a TorchDispatchMode sees the operators that run, which tells which kernel it
was, and finds attention that is written out. A TorchFunctionMode would do neither: under one nn.MultiheadAttention
leaves its fast path, and its call of scaled_dot_product_attention stays hidden.

The model's results are the same bits with and without: every operator is handed on as it came, what the doctor
computes for itself is without modes, gradients, autocast and random numbers, and it keeps records, no tensors (of
storages it keeps weak references, which tell whether they are still alive).

On a GPU it pauses for a few steps, so that ``steps`` can time them alone: what only those did is not seen.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils.checkpoint import _StopRecomputationError

from .. import api, dispatch
from ..request import Request
from . import examine, kernels
from .records import ByHand, Call, Comparison, MaskFacts, Place, dtype_name, place
from .steps import DOCTOR, FORWARD, TRAINING, Sampler, StepTimes
from .trails import OUTPUT, PRODUCTS, SOFTMAX, Hand, Trails, is_plain, key, nbytes

aten = torch.ops.aten
MOST_CALLS = 256  # different ones; others are counted only

_FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu: "flash",
    aten._scaled_dot_product_flash_attention: "flash",
    aten._scaled_dot_product_efficient_attention: "efficient",
    aten._scaled_dot_product_cudnn_attention: "cudnn",
}
_FAST_PATHS = (aten._native_multi_head_attention, aten._transformer_encoder_layer_fwd)
_COMPARE = (aten.equal, aten.allclose)  # not eq, of which isclose and assert_close are made
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


class _Local(threading.local):
    """Of each thread: the modules being called, outermost first, and how deep in the doctor or in an attention call."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.autocast: tuple[str, ...] = ()  # devices, as the last module found it
        self.inside = 0


class _Kernels(TorchDispatchMode):
    """The operators of one attention call."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.packets: set[Any] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.packets.add(getattr(func, "overloadpacket", func))
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Everything seen between ``__enter__`` and ``__exit__``."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Call] = {}
        self.hands: dict[Any, ByHand] = {}
        self.comparisons: dict[Any, Comparison] = {}
        self.times = StepTimes()
        self.lines: Counter[Place] = Counter()
        self.uncounted = 0  # calls beyond MOST_CALLS
        self.unseen: set[str] = set()
        self.trained = False  # an optimizer stepped
        self._local = _Local()
        self._busy = False  # an operator of the watched thread, or the doctor, runs
        self._trails = Trails()
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        self._paused = ""  # the kind of step that runs alone at present
        self._ends_with: nn.Module | None = None  # the module whose call ends such a step, if it is no training step
        self._beneath: TorchDispatchMode | None = None  # the user's mode below this one while it is paused

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would leave functions uncompiled under the watch, and for good."""
        return True

    is_infra_mode = ignore_compile_internals  # the same for torch before 2.10

    # --- beginning and end ------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        hooks = [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]
        self._undo += [h.remove for h in hooks]
        self._wrap_sdpa()
        self._wrap_tilewise()
        self._sampler = Sampler(lambda: self._busy or bool(self._paused))
        self._thread = threading.get_ident()
        super().__enter__()
        self.times.start()
        self._sampler.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._sampler.stop()
        self.lines = self._sampler.lines
        self.times.finish()
        if not self._paused:
            super().__exit__(*error)
        self._paused, self._ends_with, self._beneath = "", None, None
        while self._undo:
            self._undo.pop()()
        self.unseen |= self.times.notes
        self._trails = Trails()

    def _wrap_sdpa(self) -> None:
        """In torch.nn.functional, and wherever a module's ``from ... import`` took it before."""
        theirs = F.scaled_dot_product_attention

        @functools.wraps(theirs)
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
            if torch.compiler.is_compiling() or self._alone():
                return theirs(*args, **kwargs)
            return self._sdpa(theirs, args, kwargs)

        _replace(theirs, scaled_dot_product_attention)
        self._undo.append(lambda: _replace(scaled_dot_product_attention, theirs))

    def _wrap_tilewise(self) -> None:
        theirs = api._run

        def run(r: Request, choice: api.Choice) -> dispatch.Output:
            if torch.compiler.is_compiling() or self._alone():
                return theirs(r, choice)
            return self._tilewise(theirs, r, choice)

        api._run = run
        self._undo.append(lambda: setattr(api, "_run", theirs))

    # --- modules and steps ------------------------------------------------------------------------

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._alone(module):
            return
        if not self._local.modules:
            self._names[module] = {id(m): f"{name} ({type(m).__name__})".lstrip() for name, m in module.named_modules()}
            self._trails.parameters |= {key(p) for p in module.parameters()} - {None}
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            self.unseen.add("inside of torch.compile: of a compiled region only the attention kernels that it calls")
        self._local.modules.append(module)
        self._local.autocast = _autocast()

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._paused:
            if module is self._ends_with:
                self._step_ends(FORWARD, module)
            return
        if torch.compiler.is_compiling() or module not in self._local.modules:
            return
        while self._local.modules.pop() is not module:
            pass
        if not (self._local.modules or module.training or self.trained):
            self._step_ends(FORWARD, module)

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.trained = True
        self._step_ends(TRAINING, None)

    # --- steps that run alone ---------------------------------------------------------------------

    def _step_ends(self, kind: str, module: nn.Module | None) -> None:
        if self._paused:
            if kind == self._paused and not self.times.cut_alone():
                self._resume()
        else:
            with self._own():
                alone = self.times.cut(kind)
            if alone and threading.get_ident() == self._thread and _get_current_dispatch_mode() is self:
                super().__exit__(None, None, None)
                self._paused, self._ends_with, self._beneath = kind, module, _get_current_dispatch_mode()
        if self._paused:
            self.times.begin_alone()

    def _resume(self) -> None:
        """Unless the user has entered a mode since, which must be the first to leave."""
        if threading.get_ident() == self._thread and _get_current_dispatch_mode() is self._beneath:
            self._paused, self._ends_with, self._beneath = "", None, None
            super().__enter__()

    def _alone(self, module: nn.Module | None = None) -> bool:
        """Whether a step runs alone; one that turns out to be none, as no more of its kind come, is watched."""
        if self._paused:
            other = module is not None and module.training == (self._paused == FORWARD) and module in self._names
            if other or self.times.overdue():
                self._resume()
        return bool(self._paused)

    def _module(self) -> str:
        """The innermost module's name in the outermost."""
        if not (stack := self._local.modules):
            return ""
        return self._names.get(stack[0], {}).get(id(stack[-1]), f"({type(stack[-1]).__name__})")

    def _root(self) -> nn.Module | None:
        return self._local.modules[0] if self._local.modules else None

    def _training(self) -> bool | None:
        if self._local.modules:
            return self._local.modules[-1].training
        return None if torch.is_grad_enabled() else False  # without gradients it is inference

    # --- the doctor's own work --------------------------------------------------------------------

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Unseen by every mode, and without effect on the model."""
        before, self._busy = self._busy, True
        self._local.inside += 1
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), _no_autocast():
                yield
        finally:
            self._local.inside -= 1
            self._busy = before

    @contextmanager
    def _inside(self) -> Iterator[_Kernels]:
        """A call of the model's own: its operators are named, and not looked at one by one."""
        before, self._busy = self._busy, True
        self._local.inside += 1
        try:
            with _Kernels() as seen:
                yield seen
        finally:
            self._local.inside -= 1
            self._busy = before

    # --- attention calls --------------------------------------------------------------------------

    def _sdpa(self, theirs: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        named = {**_DEFAULTS, **dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        if self._local.inside or len(args) > len(_ARGUMENTS) or not {*_ARGUMENTS[:3]} <= {*named}:
            return theirs(*args, **kwargs)
        where = place()
        try:
            with self._inside() as seen:
                out = theirs(*args, **kwargs)
        except _StopRecomputationError:  # checkpointing has what it needs: the call itself went well
            self._record_sdpa(named, where, _which(seen), None, "")
            raise
        except Exception as e:
            self._record_sdpa(named, where, None, None, str(e))
            raise
        self._record_sdpa(named, where, _which(seen), out, "")
        return out

    def _record_sdpa(self, named: dict[str, Any], where: Place | None, ran: str | None, out: Any, error: str) -> None:
        mask = named["attn_mask"]
        call = self._new_call("scaled_dot_product_attention", where, *(named[n] for n in _ARGUMENTS[:3]))
        call.ran, call.error = ran, error
        call.dropout_p, call.is_causal = float(named["dropout_p"]), bool(named["is_causal"])
        call.scale, call.allowed = named["scale"], _allowed()
        plain = all(is_plain(x) for x in (*(named[n] for n in _ARGUMENTS[:3]), *([] if mask is None else [mask])))
        mask_key = (
            None if mask is None or not plain else (tuple(mask.shape), mask.dtype, mask.requires_grad, nbytes(mask))
        )
        known = self._seen((call.scale, call.is_causal, call.dropout_p, mask_key, call.allowed), call)
        if known is None or not plain:
            if known is call:
                call.note = "not examined: its tensors are of a subclass, traced or vmapped"
            return
        with self._own(), torch.profiler.record_function(DOCTOR):
            try:
                r, said = examine.request_of(named), ""
            except (TypeError, ValueError) as e:
                r, said = None, str(e)
            if known is call:
                call.note = said and f"not compared with tilewise: {said}"
                self._explain(call, named, r)
            if isinstance(out, Tensor):
                out4 = out if r is None else api._four_dims(out)
                self._look_at_output(known, r, out4, first=known is call)
                self._trails.tag(out, OUTPUT, known)

    def _explain(self, call: Call, named: dict[str, Any], r: Request | None) -> None:
        """Once for identical calls: the reasons, what another device would do, and whose mask it is."""
        inputs, kind = kernels.inputs_of(named), named["query"].device.type
        ran = "math" if call.ran is None else call.ran
        faster = kernels.FASTER.get(kind, ())
        for name in faster if call.ran is None else faster[: faster.index(ran)] if ran in faster else faster:
            if reasons := _why_not(name, kind, inputs, named, r, call):
                call.reasons[name] = reasons
                if changes := kernels.change(kind, name, inputs):
                    call.changes[name] = changes
        if kind != "cuda":
            call.on_cuda = kernels.would_run("cuda", inputs)
            answers = {name: kernels.why_not("cuda", name, inputs) for name in kernels.FASTER["cuda"]}
            call.on_cuda_reasons = {name: reasons for name, reasons in answers.items() if reasons}
        if r is not None:
            call.tilewise = next((n for n in dispatch.AUTO if dispatch.get(n).can(r)), None)
        if (mask := named["attn_mask"]) is not None:
            memory = self._trails.memory_of(mask, self._root())
            same_as = examine.recognise(r, mask) if r is not None else ""
            call.mask = MaskFacts(tuple(mask.shape), dtype_name(mask.dtype), mask.requires_grad, memory, same_as)

    def _tilewise(self, theirs: Callable[..., dispatch.Output], r: Request, choice: api.Choice) -> dispatch.Output:
        if self._local.inside:
            return theirs(r, choice)
        where, ran = place(), None
        try:
            ran = dispatch.select(r, choice).name
            with self._inside():
                out = theirs(r, choice)
        except _StopRecomputationError:
            self._record_tilewise(r, where, ran, None, "")
            raise
        except Exception as e:
            self._record_tilewise(r, where, None, None, str(e))
            raise
        self._record_tilewise(r, where, ran, out, "")
        return out

    def _record_tilewise(
        self, r: Request, where: Place | None, ran: str | None, out: dispatch.Output | None, error: str
    ) -> None:
        call = self._new_call("tilewise.attention", where, r.q, r.k, r.v)
        call.ran, call.tilewise, call.error = ran, ran, error
        call.dropout_p, call.scale = r.dropout_p, r.scale
        known = self._seen((*r.features().values(), error), call)
        if known is None or not all(is_plain(x) for x in (r.q, r.k, r.v)):
            return
        with self._own(), torch.profiler.record_function(DOCTOR):
            if known is call:
                call.note = "; ".join(r.features().values())
                before = dispatch.AUTO[: dispatch.AUTO.index(ran)] if ran in dispatch.AUTO else dispatch.AUTO
                call.reasons = {n: reasons for n in before if (reasons := dispatch.get(n).why_not(r))}
            if out is not None:
                self._look_at_output(known, r if r.ragged is None else None, out.out, first=known is call)
                self._trails.tag(out.out, OUTPUT, known)

    def _new_call(self, name: str, where: Place | None, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return Call(
            name, where, _shape(q), _shape(k), _shape(v), dtype_name(q.dtype), str(q.device),
            grads=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)), training=self._training(),
        )  # fmt: skip

    def _seen(self, more: tuple, call: Call) -> Call | None:
        """The call that this one is identical to, itself if it is the first, None beyond the limit; counted."""
        key = (
            call.api,
            call.place,
            call.query,
            call.key,
            call.value,
            call.dtype,
            call.device,
            call.grads,
            call.training,
        )
        key = (*key, call.ran, *more)
        if key not in self.calls and len(self.calls) >= MOST_CALLS:
            self.uncounted += 1
            return None
        known = self.calls.setdefault(key, call)
        _add(known.modules, self._module())
        return known

    def _look_at_output(self, call: Call, r: Request | None, out: Tensor, first: bool) -> None:
        if _is_capturing(out):
            return
        call.nan = call.nan or examine.nan_rows(r, out)
        if first and r is not None and r.dropout_p == 0 and 0 not in (*r.q.shape, *r.k.shape, *r.v.shape):
            call.numerics, call.bit_equal = examine.against_exact(r, out)

    # --- operators --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before, self._busy = self._busy, True
        try:
            op = getattr(func, "overloadpacket", func)
            with _autocast_within(self._local.autocast) if op in _FAST_PATHS else nullcontext():
                out = func(*args, **kwargs)
            self.times.count()
            if not self._local.inside:
                self._look(op, args, kwargs, out)
            return out
        finally:
            self._busy = before

    def _look(self, op: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        y = out[0] if isinstance(out, tuple | list) and out else out
        if op in _COMPARE:
            self._compared(op, args, out)
        elif op in _FUSED or op in _FAST_PATHS:
            self._kernel_alone(op, args, y)
        if not is_plain(y):
            return
        inputs = [x for x in (*args, *kwargs.values()) if is_plain(x)]
        self._trails.made(op, inputs, y)
        if op in PRODUCTS:
            if (hand := self._trails.product(inputs, y)) is not None:
                self._finished(hand, y)
        elif op in SOFTMAX:
            hand = self._trails.softmax(args[0], args[1], y)
            if hand is not None and not _is_capturing(y):
                with self._own():
                    hand.nan = examine.softmax_nan_rows(args[0], y)
        else:
            self._trails.follow(op, inputs, args, y)

    def _finished(self, hand: Hand, y: Tensor) -> None:
        found = hand.finish(self._training())
        name = (found.scores, found.softmax, found.average, found.shape, found.dtype, found.dropout_p, found.training)
        known = self.hands.setdefault(name, found)
        known.nan = known.nan or found.nan
        _add(known.modules, self._module())
        self._trails.tag(y, OUTPUT, None)

    def _kernel_alone(self, op: Any, args: tuple, y: Any) -> None:
        """A kernel whose call was not seen: called by name, or from a compiled region."""
        fast_path = op in _FAST_PATHS
        if fast_path and is_plain(args[0]):  # (B, L, E) and the number of heads
            heads = args[2] if op is aten._transformer_encoder_layer_fwd else args[4]
            q = k = v = args[0].unflatten(-1, (heads, -1)).transpose(1, 2)
        else:
            q, k, v = (args[0],) * 3 if fast_path else args[:3]
        name = "fast path of nn.MultiheadAttention" if fast_path else "an SDPA kernel, called past F"
        call = self._new_call(name, place(), q, k, v)
        call.ran = "native" if fast_path else _FUSED[op]
        call.note = "" if fast_path else "how it was called was not seen: by name, or from a compiled region"
        known = self._seen((), call)
        if known is not None and is_plain(y):
            with self._own():
                self._look_at_output(known, None, y, first=False)
            self._trails.tag(y, OUTPUT, known)

    def _compared(self, op: Any, args: tuple, out: Any) -> None:
        pair = [x for x in args[:2] if isinstance(x, Tensor)]
        if len(pair) < 2 or pair[0].shape != pair[1].shape:
            return
        tags = [tag for x in pair if (tag := self._trails.tagged(x, OUTPUT)) is not None]
        if not tags:
            return
        if not out:
            call = next((tag.subject for tag in tags if tag.subject is not None), None)
            found = Comparison(place(), str(op), call, 1)
            known = self.comparisons.setdefault((found.place, found.operator, id(call)), found._replace(times=0))
            self.comparisons[found.place, found.operator, id(call)] = known._replace(times=known.times + 1)


# --- helpers --------------------------------------------------------------------------------------


def _replace(old: Any, new: Any) -> None:
    """Wherever a module outside of PyTorch, or torch.nn.functional, holds ``old`` under some name, put ``new``."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and module is not F:
            continue
        for attribute, x in list(getattr(module, "__dict__", {}).items()):
            if x is old:
                setattr(module, attribute, new)


def _add(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _allowed() -> tuple[str, ...]:
    cuda = torch.backends.cuda
    on = {
        "flash": cuda.flash_sdp_enabled(), "cudnn": cuda.cudnn_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(), "math": cuda.math_sdp_enabled(),
    }  # fmt: skip
    return tuple(name for name, yes in on.items() if yes)


def _why_not(
    name: str, kind: str, inputs: kernels.Inputs, named: dict[str, Any], r: Request | None, call: Call
) -> list[dispatch.Reason]:
    """All reasons against a kernel on the call's own device; none if PyTorch says that it takes the call."""
    reasons = []
    if name not in call.allowed:
        reasons.append(dispatch.Reason("is switched off", "leave sdpa_kernel() out, or name it there"))
    if kernels.takes(name, named):
        return reasons
    said = kernels.why_not(kind, name, inputs)
    if not said and r is not None:
        said = dispatch.get(f"torch_{name}").why_not(r)
    return reasons + (said or [dispatch.Reason("PyTorch refuses it, and says no more")])


def _shape(x: Tensor) -> tuple[int, ...]:
    """-1 where the sequences of a nested tensor differ."""
    return (x.size(0), *(-1,) * (x.dim() - 1)) if x.is_nested else tuple(x.shape)


def _is_capturing(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _which(seen: _Kernels) -> str:
    return next((name for op, name in _FUSED.items() if op in seen.packets), "math")


def _autocast() -> tuple[str, ...]:
    return tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


@contextmanager
def _no_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for kind in _autocast():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _autocast_within(kinds: tuple[str, ...]) -> AbstractContextManager:
    """The fast paths rely on autocast inside of the operator, which a dispatch mode switches off."""
    names = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for kind in kinds:
        exclude = exclude.remove(names[kind])
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)
