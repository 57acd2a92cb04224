"""Who imports whom, what `import zerofn` pulls in, and what the public names promise."""

import ast
import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from public_names import NAMES

import zerofn as zf

PACKAGE = Path(zf.__file__).parent


def _name(path):
    """A module as it is imported within the package: `core.tree`, `testing`, and `__init__` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and parts[:-1] else parts)


MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FOLDERS = {_name(path) for path in PACKAGE.rglob("__init__.py")} - {"testing"}

# The contract of the design, section 2.
PUBLIC = [
    *("chain", "shard", "reduce_scatter", "all_reduce", "precision", "scale_loss", "accumulate"),
    *("clip_by_global_norm", "clip_by_value", "sgd", "adam", "adamw", "low_precision_adam", "offload", "masked"),
    *("muon", "export_safetensors", "extend"),
    *("partition", "ema", "schedules", "init", "make_step", "bind", "vjp", "update", "full_params", "attach"),
    *("guest", "leafwise", "launch", "describe", "plan", "save", "load", "from_deepspeed"),
]


@functools.cache
def tree(module):
    return ast.parse(MODULES[module].read_text())


@functools.cache
def nodes(module):
    return tuple(ast.walk(tree(module)))


@functools.cache
def imports(module):
    """(imported module, whether the import stands at the top of the module)."""
    return tuple(_imports(module))


def _imports(module):
    top = {id(node) for node in _top(tree(module))}
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if node.level and not node.module:
                yield from (("." + alias.name, id(node) in top) for alias in node.names)
            else:
                yield base, id(node) in top
                yield from ((f"{base}.{alias.name}", id(node) in top) for alias in node.names)


def _top(tree):
    """Statements that run at import, those under `if` and `try` too, but not under `if TYPE_CHECKING`."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _top(ast.Module([*node.body, *node.orelse], []))
        if isinstance(node, ast.Try):
            yield from _top(ast.Module([*node.body, *node.orelse, *node.finalbody], []))


@functools.cache
def siblings(module):
    """Modules of the package that `module` imports, anywhere, with lazy imports."""
    here = module.split(".") if module in FOLDERS | {"testing"} else module.split(".")[:-1]
    found = set()
    for name, _ in imports(module):
        dots = len(name) - len(name.lstrip("."))
        if dots:
            name = ".".join([*(here[: len(here) - dots + 1] if module != "__init__" else []), name.lstrip(".")])
        elif name == "zerofn" or name.startswith("zerofn."):
            name = name.removeprefix("zerofn").lstrip(".")
        else:
            continue
        parts = name.split(".")
        known = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        found.add(next((m for m in known if m in MODULES), "__init__"))
    return found - FOLDERS - {module}


def folder(module):
    """The row of the table that a module belongs to: its folder, or itself."""
    return module.split(".")[0] + "/" if "." in module and not module.startswith("testing.") else module.split(".")[0]


def test_modules_import_one_way():
    graph = {name: siblings(name) for name in MODULES.keys() - FOLDERS}
    # What stands on public names asks the package for them, which is imported by then and asks for contrib when it is
    # asked itself.
    graph |= {name: needs - {"__init__"} for name, needs in graph.items() if name.startswith("contrib.")}
    done, order = set(), []
    while len(done) < len(graph):
        ready = [n for n, needs in graph.items() if n not in done and needs <= done]
        assert ready, "a cycle among " + ", ".join(f"{n} -> {sorted(graph[n] - done)}" for n in graph if n not in done)
        done.update(ready)
        order += ready
    assert order.index("eager.optimizer") > order.index("core.tree")


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("optree", {"core.tree"}),
        # A face is a DTensor by its class, and is asked by torch's DCP.
        (
            "torch.distributed",
            {"ranks.backend", "ranks.dtensor", "sharded.face", "sharded.gathering", "_compat.checkpoint"},
        ),
        ("matplotlib", set()),
    ],
)
def test_only_one_module_imports(library, owners):
    found = {
        module for module in MODULES for name, _ in imports(module) if name == library or name.startswith(library + ".")
    }
    assert found <= owners, f"{library} is imported by {sorted(found - owners)}; ask for it through {owners}"


def test_torch_distributed_is_not_reached_around_the_import():
    """`torch.distributed.x` as an attribute is an import all the same."""
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node.value) == "torch":
                assert module == "ranks.backend", f"{module}.py:{node.lineno} uses torch.distributed"


def test_a_folder_imports_from_itself_and_the_rows_above_it():
    inside = (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("## Inside")[2]
    inside = inside.partition("\n## ")[0]
    rows = [re.findall(r"`([\w/]+)`", line.split("|")[1]) for line in inside.splitlines() if line.startswith("| `")]
    row_of = {name: i for i, row in enumerate(rows) for name in row}
    modules = MODULES.keys() - FOLDERS - {"__init__"}
    assert row_of.keys() == {folder(m) for m in modules}
    back = [(m, n) for m in modules for n in siblings(m) if n != "__init__" and row_of[folder(n)] > row_of[folder(m)]]
    assert not back, f"imported from a later row: {sorted(back)}"


def test_no_engine_folder_imports_the_built_in_transforms():
    found = {m for m in MODULES for n in siblings(m) if n.startswith("transforms.") and not m.startswith("transforms.")}
    assert {folder(m) for m in found} <= {"contrib/", "testing/", "testing", "__init__"}, sorted(found)


def test_no_module_holds_mutable_state():
    """Constants in capitals apart, nothing at the top of a module is a list, dict or set that code could fill."""
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List | ast.Dict | ast.Set):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [ast.unparse(t) for t in targets]
                assert all(n == "__all__" or n.lstrip("_").isupper() for n in names), (
                    f"{module}.py:{node.lineno}: {names}"
                )
            if isinstance(node, ast.Global):
                raise AssertionError(f"{module}.py:{node.lineno}: global")


# One process, since each takes seconds to import torch: what the import loads, what asking for names loads; whether
# torch reads a saved state before it and after; and what an attach loads.
IMPORTS = """
import sys, torch
try:
    torch.load(sys.argv[1])
except Exception as error:
    print(*str(error).splitlines())
before = set(sys.modules); import zerofn as zf
new = set(sys.modules) - before
print(*sorted({m.split(".")[0] for m in new}))
print(*sorted(m for m in new if m.startswith("torch.distributed.")))
print(*(m.split(".")[1] for m in sys.modules if m.startswith("zerofn.")))
print(torch.load(sys.argv[1]))
model = torch.nn.Linear(4, 4); opt = zf.attach(model, zf.adamw(1e-3))
model(torch.ones(2, 4)).sum().backward(); opt.step(); opt.zero_grad()
print(*(m.removeprefix("zerofn.") for m in sys.modules if m.startswith("zerofn")))
print(zf.testing.check_transform.__name__, zf.collectives.all_to_all.__name__, zf.__version__)
print(*(getattr(zf, n).__name__ for n in dir(zf) if n in zf._LATER)); print("save" in vars(zf))
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("fresh") / "state.pt"
    torch.save(zf.init(zf.adamw(0.1), {"w": torch.ones(2, 3)}), path)
    command = [sys.executable, "-c", IMPORTS, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout
    parts = ("refused", "roots", "distributed", "loaded", "state", "attached", "modules", "names", "kept")
    return dict(zip(parts, told.splitlines(), strict=True))


def test_to_import_zerofn_is_enough_to_load_a_state_and_without_it_the_error_is_torchs(fresh):
    assert "Weights only load failed" in fresh["refused"]
    assert fresh["state"].startswith("State(1 leaves, 6 parameters, step=0")


# Folders and modules that one process does not need. Some of them would cost as much as the rest of an attach.
OF_RANKS = ("sharded", "eager.over_ranks", "eager.gradients", "eager.step_agreement", "eager.in_backward")
OF_COLLECTIVES = ("ranks.collectives", "ranks.differentiable", "ranks.scalar_reduction", "core.owners", "core.wires")
OF_VIEWS = ("module.boundary", "module.forward_hooks", "module.state_dicts")


def test_an_attach_on_one_process_loads_what_one_process_needs(fresh):
    loaded = fresh["attached"].split()
    # Seven of them are programs of formulas: plans, printers, sums of rows, and how neighbours are joined.
    assert len(loaded) < 82
    assert not [m for m in loaded if m.startswith((*OF_RANKS, *OF_COLLECTIVES, *OF_VIEWS))]


def test_import_is_light(fresh):
    """Against what `import torch` has loaded already, nothing but optree and the package."""
    roots, distributed = (set(fresh[part].split()) for part in ("roots", "distributed"))
    heavy = {
        "matplotlib",
        "numpy",
        "pandas",
        "scipy",
        "tqdm",
        "safetensors",
        "hypothesis",
        "pytest",
        "transformers",
        "lightning",
        "accelerate",
        "triton",
    }
    assert not roots & heavy
    heavy = ("fsdp", "tensor", "_tensor", "pipelining", "rpc", "elastic", "optim", "checkpoint", "_composable")
    assert not [m for m in distributed if m.split(".")[2] in heavy]
    assert "testing" not in fresh["loaded"].split()


def test_names_are_imported_when_they_are_asked_for(fresh):
    assert set(fresh["loaded"].split()) == {"_compat"}
    assert sorted(fresh["names"].split()) == sorted(zf._LATER) and fresh["kept"] == "True"
    # What a type checker reads says the same.
    checked = next(x for x in tree("__init__").body if isinstance(x, ast.If))
    told = {a.name: x.module for x in checked.body if isinstance(x, ast.ImportFrom) for a in x.names}
    modules = dict.fromkeys(("collectives", "extend", "integrations", "schedules"))
    assert told == {**zf._LATER, **modules, "curvature": "contrib"}


def test_nothing_but_tests_imports_testing():
    assert not [m for m in MODULES if "testing" in siblings(m)]


def test_modules_and_the_version_are_there_after_the_import(fresh):
    assert fresh["modules"].split() == ["check_transform", "all_to_all", zf.__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+", zf.__version__)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist(name):
    assert hasattr(zf, name)


def public():
    found = {n: x for n, x in NAMES.items() if not inspect.ismodule(x)}
    own = {n: v for n, v in vars(zf.schedules).items() if getattr(v, "__module__", "") == zf.schedules.__name__}
    found |= {f"schedules.{n}": v for n, v in own.items() if n.islower() and not n.startswith("_")}
    return {n: v for n, v in found.items() if getattr(v, "__module__", "").startswith("zerofn")}


@pytest.mark.parametrize("name", sorted(public()))
def test_public_names_have_a_docstring_with_an_example(name):
    thing = public()[name]
    doc = inspect.getdoc(thing) or ""
    assert len(doc.splitlines()[0]) > 20 if doc else False, f"{name} has no docstring"
    if inspect.isclass(thing):
        # Returned by functions that have one.
        return
    assert ">>>" in doc, f"the docstring of {name} has no example"


def test_public_signatures():
    """The arguments of the design, by name and in order, with its defaults."""

    def arguments(f):
        return [p.name for p in inspect.signature(f).parameters.values()]

    dtypes = ["param_dtype", "store_dtype", "grad_dtype", "reduce_dtype", "output_dtype"]
    assert arguments(zf.precision) == [*dtypes, "labels", "buffer_dtype", "rounding", "seed"]
    scale = {p.name: p.default for p in inspect.signature(zf.scale_loss).parameters.values()}
    assert scale == {
        "scale": "dynamic",
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_scale": 1.0,
        "hysteresis": 1,
    }
    assert arguments(zf.accumulate) == ["every", "weighted"]
    assert arguments(zf.clip_by_global_norm) == ["max_norm", "over"]
    assert arguments(zf.clip_by_value) == ["max_value"]
    assert arguments(zf.sgd)[:2] == ["lr", "momentum"]
    assert arguments(zf.adam)[:3] == ["lr", "betas", "eps"]
    assert arguments(zf.adamw)[:4] == ["lr", "betas", "eps", "weight_decay"]
    low = ["lr", "betas", "eps", "weight_decay", "state_dtype", "rounding", "seed"]
    assert arguments(zf.low_precision_adam) == low
    assert arguments(zf.offload) == ["transform", "device", "compute", "master_dtype"]
    assert arguments(zf.masked) == ["transform", "mask"]
    assert arguments(zf.leafwise) == ["function", "init", "optimizer", "needs"]
    assert arguments(zf.guest) == ["transformation", "needs"]
    assert arguments(zf.partition) == ["transforms", "labels"] and arguments(zf.ema) == ["decay"]
    assert arguments(zf.init) == ["tx", "params", "create_graph", "init", "seed", "device"]
    assert arguments(zf.make_step) == ["loss_fn", "tx", "donate", "create_graph", "capturable"]
    assert arguments(zf.bind) == ["fn", "tx", "state"]
    assert arguments(zf.vjp) == ["fn", "tx", "state", "inputs", "create_graph"]
    assert arguments(zf.update)[:3] == ["tx", "grads", "state"] and arguments(zf.full_params)[:2] == ["tx", "state"]
    assert arguments(zf.attach)[:2] == ["model", "tx"]
    assert arguments(zf.Optimizer.backward)[1:] == ["loss", "retain_graph", "scale_wrt_gas"]


def test_private_names_of_torch_are_in_one_module():
    """A name with an underscore that nobody in the package makes is somebody else's."""
    ours, used = {part for m in MODULES for part in m.split(".")}, []
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and not module.startswith("_compat."):
                if isinstance(node.ctx, ast.Store):
                    ours.add(node.attr)
                if node.attr.startswith("_"):
                    used.append((module, node.lineno, ast.unparse(node.value), node.attr))
            elif (
                isinstance(node, ast.ImportFrom)
                and not module.startswith("_compat.")
                and (node.module or "").startswith("torch")
            ):
                used += [(module, node.lineno, "torch", name) for name in (*node.module.split("."), *_names(node))]
    private = [u for u in used if u[3].startswith("_") and not u[3].startswith("__") and u[2] not in ("os", "sys")]
    theirs = [f"zerofn/{m.replace('.', '/')}.py:{n}: {base}.{name}" for m, n, base, name in private if name not in ours]
    assert private and not theirs, "give these a name in zerofn/_compat:\n" + "\n".join(theirs)


def _names(node):
    return [alias.name for alias in node.names]


def test_built_in_transforms_are_written_with_what_extend_exports():
    found = {folder(n) for m in MODULES if m.startswith("transforms.") for n in siblings(m)}
    assert found == {"_errors", "extend", "transforms/"}


DOORS = {"zerofn", *(f"zerofn.{m}" for m in ("extend", "schedules", "collectives", "integrations", "testing"))}


# What a module of contrib takes from the inside of the package, and why no public name can give it.
INSIDE_OF_CONTRIB = {
    "contrib.deepspeed_checkpoint": {
        "core.bucketed_views": "how an attached model stores what it sees: where tensor parallelism has cut the model,",
        "core.pipeline": "no function of a transform and a state can resolve its pipeline; so `opt._own` is read too",
        "storage.files": "the error for a file that differs from what was written, as `zf.load` raises it",
        "storage.saving": "ranks come together, and raise the error of one of them on all, as `zf.load` does",
    },
    "contrib.doctor": {
        "kernels.native": "where this installation keeps the kernels that it has built",
        "ranks.backend": "what torch was built with; only this module imports torch.distributed",
    },
    "contrib.profile": {
        "_compat.autograd": "private names of torch: where a backward is, and its end",
        "_compat.functorch": "private names of torch: whether torch.func has wrapped a tensor",
        "core.html": "the look of the package's tables in notebooks",
        "storage.tables": "the look of the package's tables as text",
    },
    "contrib.unroll": {"_compat.functorch": "private names of torch: the levels of torch.func"},
}
PRIVATE_ATTRIBUTES = {"contrib.deepspeed_checkpoint": {"_own"}}


def of_the_inside(module):
    """What a module imports that is no public door, its own folder left out."""
    doors = {"__init__", *(door.removeprefix("zerofn.") for door in DOORS)}
    return {name for name in siblings(module) if name not in doors and not name.startswith("contrib.")}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("contrib.")))
def test_contrib_stands_on_public_names(module):
    assert of_the_inside(module) == INSIDE_OF_CONTRIB.get(module, {}).keys()
    # What it asks the package itself for is public, and so is what it asks of objects.
    asked = [name for name, _ in imports(module) if name.startswith("zerofn.")]
    assert [name for name in asked if name.count(".") == 1 and name[7:] not in dir(zf)] == []
    assert [name for name in asked if name.startswith("zerofn.extend.") and name[14:] not in zf.extend.__all__] == []
    attributes = [node for node in nodes(module) if isinstance(node, ast.Attribute)]
    others = [x.attr for x in attributes if ast.unparse(x.value) != "self" and re.match("_[a-z]", x.attr)]
    assert {name for name in others if name not in OF_TUPLES} == PRIVATE_ATTRIBUTES.get(module, set())


OF_TUPLES = {"_replace", "_asdict", "_fields"}  # public, though their names do not look so


def test_nothing_imports_contrib_but_the_lazy_table():
    importers = {m for m in MODULES for n in siblings(m) if n.startswith("contrib.") and not m.startswith("contrib.")}
    assert importers == {"__init__", "__main__"}
    # In `__init__` for type checkers alone.
    assert not [n for n, at_top in imports("__init__") if "contrib" in n and at_top]


def unmarked(source):
    """Lines of a test that import from the inside of the package without saying why: `# inside: why`."""
    found, lines = [], source.splitlines()
    if not any(
        re.match(r" *(from|import) zerofn", x) and not re.search(r"# inside: \w|zerofn as zf", x) for x in lines
    ):
        return []
    for node in ast.walk(ast.parse(source)):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [f"zerofn.{a.name}" for a in node.names if (PACKAGE / a.name).is_dir()]
            modules = modules if node.module == "zerofn" else [node.module or ""]
        inside = any(name.startswith("zerofn.") and name not in DOORS for name in modules)
        if inside and not re.search(r"# inside: \w", lines[node.lineno - 1]):
            found.append(lines[node.lineno - 1])
    return found


def test_tests_say_where_they_reach_inside_of_the_package():
    assert unmarked("import zerofn.core.tree") == ["import zerofn.core.tree"]
    assert unmarked("from zerofn import core") == ["from zerofn import core"]
    assert unmarked("from zerofn.core.tree import flatten  # inside") != []
    assert not unmarked("from zerofn.extend import View\nfrom zerofn.core.tree import flatten  # inside: the order")
    tests = Path(__file__).parent
    found = {str(path.relative_to(tests)): unmarked(path.read_text()) for path in tests.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}
