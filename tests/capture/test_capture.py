"""capture: a dry run on meta tensors equals a real run, call by call and storage by storage."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import weft
from tests.dry_runs import capture, default_plan
from tests.graphs_for_tests import PRODUCTS, random_graph
from weft.capture.observer import Observer
from weft.core.errors import GraphError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.models import MODELS
from weft.core.plan import Plan
from weft.core.program import MARKER_KEPT, Program
from weft.core.task import Task
from weft.runtime.group import GroupRun
from weft.weave.step import Weaver

VARIANTS = [{}, {"norm": "batch", "residual": True}, {"norm": "layer", "input_dropout": 0.3}, {"optimizer": "sgd"}]


def observed(tasks: list[Task], graph: weft.Graph, plan: Plan) -> Observer:
    """A real epoch on the CPU, after one that builds what is built once; its calls start at ``first``."""
    observer = Observer("cpu")
    run = GroupRun(tasks, graph, plan, torch.device("cpu"))
    run.step()
    with observer:
        run.step()
    return observer


def made(program: Program) -> list[tuple[str, tuple[int, ...]]]:
    """Every operator up to the evaluation with the bytes it allocates."""
    resident, seen, found = set(program.resident), set(), []
    for op in program.operators:
        new = [v for v in op.writes if v not in resident and v not in seen]
        seen |= set(new)
        if op.phase != "evaluation":
            found.append((op.name, tuple(program.values[v].bytes for v in new)))
    return found


def lives(program: Program) -> list[int]:
    """Bytes alive at every operator up to the evaluation, that the step itself allocated."""
    lifetimes = {v: life for v, life in program.lifetimes().items() if v not in program.carried}
    end = next(i for i, op in enumerate(program.operators) if op.phase == "evaluation")
    values = program.values
    return [sum(values[v].bytes for v, (a, b) in lifetimes.items() if a <= now <= b) for now in range(end)]


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_cpu_step_without_data_is_the_step_with_data(model, options, tasks):
    graph = random_graph()
    group = [Task(graph=graph, model=model, hidden=16, epochs=3, **options)] * tasks
    plan = default_plan(group, "cpu")
    program = capture(group, graph.stats(), plan=plan).program
    real = observed(group, graph, plan)
    calls = made(program)
    truth = [(call.name, tuple(real.storages[n].bytes for n in call.made)) for call in real.calls]
    assert calls == truth[: len(calls)]
    now, alive = 0, []
    for call in real.calls[: len(calls)]:
        now += sum(real.storages[n].bytes for n in call.made)
        alive.append(now)
        now -= sum(real.storages[n].bytes for n in call.frees if real.storages[n].born >= 0 and n in made_in(real))
    assert lives(program) == alive


def made_in(observer: Observer) -> set[int]:
    return {number for call in observer.calls for number in call.made}


def flops(program, phase=None):
    """Of one step, or of one phase of it."""
    return sum(op.flops for op in program.operators if phase in (None, op.phase))


def test_members_find_the_weights_of_their_last_evaluation_and_let_them_go():
    graph = random_graph()
    one, many = (capture(Task(graph=graph, model="gcn", hidden=16), graph.stats(), tasks=tasks) for tasks in (1, 3))
    assert one.program.carried == ()
    weights = 4 * 3 * many.run.num_parameters(0)
    for ids in (many.program.carried, many.program.left):
        assert sum(many.program.values[v].bytes for v in ids) == weights
    left = many.preparation.left
    assert sum(many.preparation.values[v].bytes for v in left) == weights
    assert not set(many.program.carried) & set(many.program.resident)


@pytest.mark.parametrize("tasks", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_graph_too_large_for_this_machine_is_captured_from_its_summary(model, tasks):
    program = capture(Task(graph="products", model=model, layers=3, hidden=64), PRODUCTS, tasks=tasks).program
    assert program.unknown == ()
    assert program.tasks == tasks
    kinds = program.bytes_by_kind(program.resident)
    assert kinds["graph"] > 4 * PRODUCTS.num_edges
    assert kinds["input"] >= 4 * PRODUCTS.num_nodes * PRODUCTS.num_features
    hidden = 4 * tasks * PRODUCTS.num_nodes * 64
    assert program.bytes_by_kind()["activation"] >= 2 * hidden
    assert {op.phase for op in program.operators} == {"forward", "backward", "update", "evaluation"}
    assert all(op.launches >= 1 for op in program.operators if op.flops)


def test_no_gpu_is_asked_for():
    code = (
        "import torch; from tests.graphs_for_tests import PRODUCTS; from weft.core.task import Task;"
        "from tests.dry_runs import capture;"
        "capture(Task(graph='products', model='gat'), PRODUCTS); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_group_grows_by_its_activations_and_not_by_its_graph():
    task = Task(graph="products", model="gcn", layers=3)
    one, four = (capture(task, PRODUCTS, tasks=count).program for count in (1, 4))
    kinds_of_one, kinds_of_four = one.bytes_by_kind(), four.bytes_by_kind()
    assert kinds_of_four["activation"] == pytest.approx(4 * kinds_of_one["activation"], rel=1e-3)
    assert kinds_of_four["graph"] == kinds_of_one["graph"]
    assert kinds_of_four["input"] == kinds_of_one["input"]
    assert flops(four) == pytest.approx(4 * flops(one), rel=0.05)


def test_two_stacks_are_followed_in_one_woven_step():
    group = [Task(graph="products", model="gcn"), Task(graph="products", model="gin", layers=3)]
    plan = Plan(("a", "b"), join="woven", device="cuda", replay=True, stacks=((0,), (1,)))
    captured = capture(group, PRODUCTS, plan=plan, merger=Weaver())
    assert captured.run.notes == []
    program = captured.program
    alone = [capture(task, PRODUCTS, plan=Plan(("a",), device="cuda", replay=True)).program for task in group]
    assert flops(program) == pytest.approx(sum(map(flops, alone)), rel=1e-6)
    assert "weft.merged_call" in {op.name for op in program.operators}
    assert program.unknown == ()
    kinds, apart = program.bytes_by_kind(), [one.bytes_by_kind() for one in alone]
    assert kinds["activation"] == pytest.approx(sum(each["activation"] for each in apart), rel=0.2)
    assert {op.phase for op in program.operators} == {"forward", "backward", "update", "evaluation"}


def test_a_woven_step_on_a_cpu_is_the_real_one():
    graph = random_graph()
    group = [Task(graph=graph, model="gcn", hidden=8), Task(graph=graph, model="gin", hidden=16)]
    plan = Plan(("a", "b"), join="woven", stacks=((0,), (1,)))
    program = capture(group, graph.stats(), "cpu", plan=plan, merger=Weaver()).program
    run = GroupRun(group, graph, plan, torch.device("cpu"), Weaver())
    run.merge()
    run.step()
    with Observer("cpu") as real:
        run.step()
    calls = made(program)
    truth = [(call.name, tuple(real.storages[n].bytes for n in call.made)) for call in real.calls]
    assert calls == truth[: len(calls)]


def test_stacks_side_by_side_have_the_phases_of_each():
    group = [Task(graph="products", model="gcn"), Task(graph="products", model="gin")]
    plan = Plan(("a", "b"), device="cuda", stacks=((0,), (1,)))
    program = capture(group, PRODUCTS, plan=plan).program
    alone = [capture(task, PRODUCTS, plan=Plan(("a",), device="cuda")).program for task in group]
    for phase in ("backward", "update"):
        assert flops(program, phase) == pytest.approx(sum(flops(one, phase) for one in alone))


@pytest.mark.parametrize("kind", [{"sparse": True}, {"multilabel": True}, {"weighted": True}, {"directed": True}])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_every_kind_of_graph(model, device, kind):
    graph = random_graph(**kind)
    program = capture(Task(graph=graph, model=model), graph, device).program
    assert program.unknown == ()
    again = capture(Task(graph=graph, model=model), graph.stats(), device).program
    assert again.resident_bytes == pytest.approx(program.resident_bytes, rel=0.05)


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"aggregator": "max"}, {"feature_norm": "row"}, {"metric": "f1_macro"}], ids=str
)
def test_every_setting(options):
    program = capture(Task(graph="products", model="sage", **options), PRODUCTS).program
    assert program.unknown == ()


def test_preparation_is_a_program_of_its_own():
    preparation = capture(Task(graph="products", model="gat"), PRODUCTS).preparation
    assert preparation.operators[0].phase == "preparation"
    assert preparation.operators[-1].name == MARKER_KEPT
    assert "aten.sort" in {op.name for op in preparation.operators}  # the transpose's order of the edges


def test_what_preparation_keeps_is_what_the_step_finds():
    captured = capture(Task(graph="products", model="gcn"), PRODUCTS)
    kept = captured.preparation.operators[-1].reads
    assert sum(captured.preparation.values[i].bytes for i in kept) == captured.program.resident_bytes


def test_a_graph_without_features_is_refused():
    with pytest.raises(GraphError, match="'bare' has 0 features"):
        capture(Task(graph="bare"), GraphStats("bare", 10, 20))


class Plain(nn.Module):
    """A user's module over weft layers, with a norm and a jump from the first layer to the last."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one, self.two = weft.nn.GCNConv(inputs, 32), weft.nn.SAGEConv(32, 32)
        self.norm, self.last = nn.LayerNorm(32), nn.Linear(64, outputs)

    def forward(self, x, adj):
        first = torch.relu(self.one(x, adj))
        second = torch.nn.functional.elu(self.norm(self.two(first, adj)))
        return self.last(torch.cat([first, second], -1))


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_module_of_ones_own(tasks):
    program = capture(Task(graph="products", model=Plain), PRODUCTS, tasks=tasks).program
    assert program.unknown == ()
    assert program.note == ""


class Asks(nn.Module):
    """Called PyG's way; how many edges it keeps, only the data knows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs)

    def forward(self, x, edge_index):
        kept = edge_index[:, edge_index[0] != edge_index[1]]
        messages = self.lin(x).index_select(0, kept[0])
        return torch.zeros(x.shape[0], messages.shape[1]).index_add(0, kept[1], messages)


def own_graph(nodes: int = 50) -> weft.Graph:
    draw = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, nodes, (2, 300), generator=draw)
    x, y = torch.rand(nodes, 7, generator=draw), torch.arange(nodes) % 3
    rows = torch.arange(nodes)
    return weft.Graph.from_edges(src, dst, nodes, x, y, rows[:20], rows[20:30], rows[30:], name="own")


class KnowsItsNodes(Asks):
    """Writes to a table of 50 rows, as a model whose adjacency is a dense matrix."""

    def forward(self, x, edge_index):
        assert x.is_meta or x.shape[0] == 50, "called on a graph that is not its own"
        return super().forward(x, edge_index)


@pytest.mark.parametrize("model", [Asks, KnowsItsNodes])
def test_a_module_that_reads_its_data_takes_a_real_step_on_its_own_graph(model):
    graph = own_graph()
    program = capture(Task(graph=graph, model=model), graph).program
    assert "one real step on a CPU" in program.note
    loops = int((graph.adj.rows() == graph.adj.indices).sum())
    sizes = {value.bytes for value in program.values}
    assert {4 * (graph.num_edges - loops) * 3, 4 * 50 * 3} <= sizes


def test_a_module_that_reads_its_data_is_not_planned_for_sizes_alone():
    with pytest.raises(SpecError, match="only the sizes are known: give the graph itself"):
        capture(Task(graph="products", model=Asks), PRODUCTS)


class Broken(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs + 1, outputs)

    def forward(self, x, adj):
        return self.lin(x)


def test_a_module_that_does_not_run_is_told_so_in_a_sentence():
    with pytest.raises(SpecError, match=r"task 'Broken': model Broken failed on graph 'products'"):
        capture(Task(graph="products", model=Broken), PRODUCTS)


class FailsInTraining(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs)

    def forward(self, x, adj):
        if self.training:
            raise KeyError("no such thing")
        return self.lin(x)


def test_a_module_that_fails_in_training_is_told_so_in_a_sentence():
    with pytest.raises(SpecError, match=r"'FailsInTraining': KeyError.* fails in training"):
        capture(Task(graph="products", model=FailsInTraining), PRODUCTS)


class AsksInTraining(FailsInTraining):
    def forward(self, x, adj):
        out = self.lin(x)
        return out * 2 if self.training and float(out.detach().sum()) > 0 else out


def test_a_module_that_asks_its_data_in_training_alone():
    graph = own_graph()
    assert "one real step on a CPU" in capture(Task(graph=graph, model=AsksInTraining), graph).program.note


def test_dropout_of_a_users_module_keeps_no_mask():
    """It is drawn again; what the layer after it reads is kept."""

    def model(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 64), nn.Dropout(0.5), nn.Linear(64, outputs))

    program = capture(Task(graph="products", model=model), PRODUCTS).program
    assert any(op.name == "weft.bias_act_dropout" for op in program.operators)
    assert not [v for v in program.values if v.dtype == "bool" and v.kind == "activation"]


class Repeated(nn.Module):
    """A layer whose dropout runs again in the backward pass."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor, graph: weft.Graph) -> torch.Tensor:
        return checkpoint(lambda x: dropout(self.dense(x), 0.3, self.training), x, use_reentrant=False)


def test_a_layer_that_is_repeated_in_the_backward_pass_is_followed():
    assert capture(Task(graph="products", model=Repeated), PRODUCTS).program.operators


def test_triton_is_not_needed():
    code = (
        "import sys; sys.modules['triton'] = None; from tests.graphs_for_tests import PRODUCTS;"
        "from weft.core.task import Task; from tests.dry_runs import capture;"
        "p = capture(Task(graph='products', model='gat'), PRODUCTS).program;"
        "print(sum(op.launches for op in p.operators), p.unknown, sum(op.workspace for op in p.operators))"
    )
    without = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    program = capture(Task(graph="products", model="gat"), PRODUCTS).program
    launches, workspace = (sum(getattr(op, name) for op in program.operators) for name in ("launches", "workspace"))
    assert without.split() == f"{launches} () {workspace}".split()


def test_the_first_estimate_of_a_process_is_like_the_second():
    """What torch imports on the way would hold tensors of the step until garbage is collected, which is off here."""
    code = (
        "import gc; gc.disable(); from torch import nn; import weft; from tests.graphs_for_tests import PRODUCTS;"
        "from weft.core.task import Task; from weft.planner.cost.memory import memory;"
        "from weft.planner.machine_profiles import profile;"
        "from tests.dry_runs import capture;"
        "build = lambda i, o: nn.Sequential(nn.Linear(i, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, o));"
        "steps = [capture(Task(graph='products', model=build), PRODUCTS, tasks=3) for _ in range(2)];"
        "print(*(memory(s.program, profile('h200'), s.preparation).peak for s in steps))"
    )
    first, second = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert first == second
