"""The private JAX names, all of them, in one place. Checked with jax 0.10.2 and 0.12.0.

What is public lives elsewhere under its public name; what JAX keeps private and jaxcoll can't do without is here, so
that a new JAX release has one file to be tried against. Importing this module does two things to JAX: modules that are
lowered from then on carry a `ModuleSites` instead of two plain dictionaries, and a program in which devices must be
known isn't lowered once for all devices (see `needs_devices`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

try:
    from jax._src import config as _config_module
    from jax._src import core as _core
    from jax._src import dispatch as _dispatch
    from jax._src.interpreters import mlir as _mlir_module
    from jax._src.interpreters.ad import p2tz as _p2tz  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lax import parallel as _parallel
    from jax._src.sharding_impls import SPMDAxisContext as _SPMDAxisContext
except ImportError as error:  # pragma: no cover - only with a JAX that nobody has tried yet
    raise ImportError(
        f"jaxcoll does not know the inside of jax {jax.__version__} ({error}); it is tested with jax 0.10.2 and 0.12"
    ) from error

_config: Any = _config_module
_mlir: Any = _mlir_module
Primitive = _core.Primitive
Rule = Callable[..., Any]
UndefinedPrimal = ad.UndefinedPrimal
Zero = ad.Zero


# ---------------------------------------------------------------------------------------------------- primitives


def jax_primitive(name: str) -> Any | None:
    """JAX's collective primitive `name` ("psum", "reduce_scatter", ...), or None where this JAX has none."""
    return getattr(_parallel, f"{name}_p", None)


def abstract_eval(prim: Any, aval: Any, params: Mapping[str, Any]) -> tuple[Any, frozenset[Any]]:
    """Output type and effects of the one-operand primitive `prim`, by JAX's own rule (shapes, vma, error texts)."""
    out, effects = prim.abstract_eval(aval, **params)
    return out, frozenset(effects)


def is_differentiable(prim: Any) -> bool:
    return prim in ad.primitive_jvps


def transpose(prim: Any, cotangent: Any, aval: Any, params: Mapping[str, Any]) -> Any:
    """JAX's transpose of the linear one-operand primitive `prim`, applied to `cotangent`."""
    (out,) = ad.primitive_transposes[prim](cotangent, UndefinedPrimal(aval), **params)
    return out


def batch(prim: Any, axis_data: Any, value: Any, dim: int | None, params: Mapping[str, Any]) -> tuple[Any, int | None]:
    """JAX's batching rule of the one-operand primitive `prim`: (result, batch dimension of the result or None)."""
    return batching.fancy_primitive_batchers[prim](axis_data, (value,), (dim,), **params)


def vmapped_axis(axis_data: Any) -> tuple[Any, int]:
    """Name and size of the axis of a vmap; one without `axis_name` has a name that is no other axis'."""
    return axis_data.name, axis_data.size


def make_primitive(
    name: str,
    *,
    abstract: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose_rule: Callable[..., Any],
    batcher: Callable[..., Any],
) -> Any:
    """A primitive with several results; run by itself it is compiled like any of JAX's own."""
    prim = Primitive(name)
    prim.multiple_results = True
    prim.def_impl(functools.partial(_dispatch.apply_primitive, prim))
    prim.def_effectful_abstract_eval(abstract)
    ad.primitive_jvps[prim] = jvp
    ad.primitive_transposes[prim] = transpose_rule
    batching.fancy_primitive_batchers[prim] = batcher
    return prim


def zero_tangent(primal_out: Any) -> Any:
    return _p2tz(primal_out)


def zero_cotangent(aval: Any) -> Any:
    return ad.Zero(aval.to_ct_aval())


def check_vma() -> bool:
    """Whether the shard_map around us checks the varying manual axes of its values (`check_vma=True`)."""
    return bool(_config._check_vma.value)


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual axes along which the type of `x` says that it may differ."""
    return frozenset(_core.typeof(x).mat.varying)


def axis_size(name: Any) -> int | None:
    """Size of the bound axis `name`, None where it is unbound."""
    env = _core.get_axis_env()
    return env.axis_size(name) if env.axis_exists(name) else None


def bound_axes() -> tuple[Any, ...]:
    return tuple(_core.get_axis_env().axis_sizes)


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], reroute: frozenset[Any]) -> Any:
    """Generator that runs `jaxpr`, and yields each equation of a primitive in `reroute` instead of running it.

    It yields (primitive, params, operand) and wants the equation's result sent back; it returns the list of outputs.
    """
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive in reroute:
            results = [(yield eqn.primitive, eqn.params, operands[0])]
        else:
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


# ------------------------------------------------------------------------------------------------------ lowering


class ModuleSites:
    """Hands out the call-site ids of one lowered module: 0, 1, 2, ... in the order of lowering."""

    def __init__(self) -> None:
        self.count = 0
        self.devices: tuple[Any, ...] | None = None

    def next(self) -> int:
        self.count += 1
        return self.count - 1


class _SiteAwareCache(dict[Any, Any]):
    """JAX's cache of lowered functions, minus the functions that hold a call site.

    A function lowered once and called twice (an inner `jit`, two equal scans) would give two collectives one call-site
    id; the two may run at the same time, in different orders on different devices, and their messages would be taken
    for each other's. So a function in which a call site was handed out is not kept, and lowered again for its next use.
    """

    def __init__(self, sites: ModuleSites, content: Mapping[Any, Any]) -> None:
        super().__init__(content)
        self.sites = sites
        self._started: dict[Any, int] = {}

    def __missing__(self, key: Any) -> Any:
        self._started[key] = self.sites.count
        raise KeyError(key)

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._started.pop(key, self.sites.count) == self.sites.count:
            super().__setitem__(key, value)


_CACHES = ("lowering_cache", "cached_primitive_lowerings")


def _install_module_sites() -> None:
    context_class = _mlir.ModuleContext
    missing = [name for name in _CACHES if name not in {f.name for f in dataclasses.fields(context_class)}]
    if missing:
        raise ImportError(
            f"jax {jax.__version__}: its lowering context has no {', '.join(missing)}; "
            "jaxcoll is tested with jax 0.10.2 and 0.12"
        )
    original = context_class.__init__
    if getattr(original, "jaxcoll", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if isinstance(self.lowering_cache, _SiteAwareCache):
            # A context derived from another one shares its caches, and so its sites. All meshes of a program have the
            # same devices in the same order: what one tells holds for a shard_map inside that names none.
            sites, mesh = self.lowering_cache.sites, getattr(self.axis_context, "mesh", None)
            if sites.devices is None and isinstance(mesh, jax.sharding.Mesh):
                sites.devices = tuple(mesh.devices.flat)
            return
        sites = ModuleSites()
        sites.devices = getattr(self.axis_context, "device_assignment", None)
        for name in _CACHES:
            setattr(self, name, _SiteAwareCache(sites, getattr(self, name)))

    init.jaxcoll = True  # type: ignore[attr-defined]
    context_class.__init__ = init


_install_module_sites()

_device_primitives: set[Any] = set()


def needs_devices(prim: Any) -> None:
    """From now on the text that a program with `prim` is lowered to holds the ids of its devices.

    JAX lowers a program whose mesh comes from `jax.set_mesh` for all meshes of one shape together, and takes that text
    for each of them. One with `prim` in a shard_map that names no devices it lowers for each list of devices.
    """
    _device_primitives.add(prim)


def _holds_unplaced(jaxpr: Any, inside: bool, seen: set[tuple[int, bool]]) -> bool:
    """Whether a primitive of `needs_devices` stands in a shard_map over a mesh without devices; `inside`: of one."""
    if (id(jaxpr), inside) in seen:
        return False
    seen.add((id(jaxpr), inside))
    for eqn in jaxpr.eqns:
        within = inside
        if eqn.primitive.name == "shard_map":
            if isinstance(eqn.params["mesh"], jax.sharding.Mesh):
                continue  # its devices are a part of what is lowered
            within = True
        if within and eqn.primitive in _device_primitives:
            return True
        if any(_holds_unplaced(sub, within, seen) for sub in _core.jaxprs_in_params(eqn.params)):
            return True
    return False


def _install_needs_devices() -> None:
    original = _dispatch.jaxpr_has_prim_requiring_devices
    if getattr(original, "jaxcoll", False):
        return

    @functools.wraps(original)
    def requires(jaxpr: Any) -> bool:
        return bool(original(jaxpr)) or _holds_unplaced(jaxpr, False, set())

    requires.jaxcoll = True  # type: ignore[attr-defined]
    _dispatch.jaxpr_has_prim_requiring_devices = requires


_install_needs_devices()


def module_sites(ctx: Any) -> ModuleSites:
    cache = ctx.module_context.lowering_cache
    if not isinstance(cache, _SiteAwareCache):
        raise RuntimeError("this module began to be lowered before jaxcoll.ops was imported: import it first")
    return cache.sites


def module_name(ctx: Any) -> str:
    """Name of the module that is being lowered: "jit_step". The same in every process that lowers the same program."""
    return str(ctx.module_context.module.operation.attributes["sym_name"]).strip('"')


@dataclasses.dataclass(frozen=True)
class MeshView:
    """What a lowering rule must know about the mesh: axes, which of them are manual, and the devices in mesh order."""

    axes: tuple[Any, ...]
    sizes: tuple[int, ...]
    manual: frozenset[Any]
    device_ids: tuple[int, ...] | None  # None: nobody told which devices these are

    @property
    def auto(self) -> tuple[Any, ...]:
        """The axes longer than 1 that the partitioner splits, not shard_map."""
        return tuple(a for a, n in zip(self.axes, self.sizes, strict=True) if a not in self.manual and n > 1)


def mesh_view(ctx: Any) -> MeshView | None:
    """The mesh of the shard_map being lowered; None outside of one."""
    context = ctx.module_context.axis_context
    if not isinstance(context, _SPMDAxisContext):
        return None
    mesh: Any = context.mesh
    devices: Iterable[Any] | None = module_sites(ctx).devices
    if devices is None and isinstance(mesh, jax.sharding.Mesh):
        devices = mesh.devices.flat
    ids = None if devices is None else tuple(int(d.id) for d in devices)
    return MeshView(tuple(mesh.axis_names), tuple(mesh.axis_sizes), frozenset(context.manual_axes), ids)


def lower_fun(fun: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """A lowering rule out of a function on JAX arrays that returns a sequence of arrays."""
    return mlir.lower_fun(fun, multiple_results=True)


def register_lowering(prim: Any, rule: Callable[..., Any], platforms: Sequence[str]) -> None:
    for platform in platforms:
        mlir.register_lowering(prim, rule, platform=platform, cacheable=False)


def register_default_lowering(prim: Any, rule: Callable[..., Any]) -> None:
    mlir.register_lowering(prim, rule, cacheable=False)


def lowering_rule(prim: Any, platform: str) -> Any | None:
    """The entry of `prim` in JAX's table of lowering rules for `platform`, None where it has none there."""
    return _mlir._platform_specific_lowerings[platform].get(prim)


class LoweringOverride:
    """Replaces the lowering rules of JAX's primitives on some platforms, and puts back exactly what was there."""

    def __init__(self) -> None:
        self._saved: list[tuple[dict[Any, Any], Any, Any]] = []

    def replace(self, prim: Any, platform: str, make: Callable[[Rule | None], Rule]) -> None:
        """Installs `make(rule so far)`; make gets None where `prim` couldn't be lowered on this platform."""
        table = _mlir._platform_specific_lowerings[platform]
        before = table.get(prim)
        default = before or _mlir._lowerings.get(prim)
        self._saved.append((table, prim, before))
        needs_devices(prim)
        mlir.register_lowering(prim, make(None if default is None else default.rule), platform=platform)

    def restore(self) -> None:
        for table, prim, before in reversed(self._saved):
            if before is None:
                table.pop(prim, None)
            else:
                table[prim] = before
            _device_primitives.discard(prim)
        self._saved.clear()


def abandon_distributed() -> None:
    """This process leaves without `jax.distributed`: it neither waits for others nor is ended when they are gone.

    Its client and service live on until the process ends: their destructors would wait as `shutdown` does.
    """
    from jax._src import distributed

    state = distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None


def distributed_client() -> tuple[Any | None, str | None]:
    """The client of `jax.distributed`'s coordination service, and the coordinator's host:port; Nones without it."""
    from jax._src import distributed

    state = distributed.global_state
    return state.client, state.coordinator_address


def wait_for_arrays() -> None:
    """Returns when every array that somebody holds is there, or its computation has failed."""
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # deleted, or donated meanwhile; or the computation's own error
            array.block_until_ready()
