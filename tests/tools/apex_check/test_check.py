"""`--check`: what of apex a project uses, line by line. Expectations are comments of the scripts that are checked."""

import importlib
import json
import os

import pytest

from amp_engine.tools.apex_check import check, inventory


def findings(path):
    return [finding for file in check.files([str(path)]) for finding in check.check_file(file, [])]


@pytest.fixture
def script(tmp_path):
    def write(source, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    return write


def expected(source):
    """Return the verdicts in the comments, `# name: verdict; name: verdict`."""
    return {
        (str(number), *entry.strip().rsplit(": ", 1))
        for number, line in enumerate(source.splitlines(), 1)
        if "  # " in line
        for entry in line.split("  # ")[1].split(";")
    }


def assert_reported(path, source):
    assert {(f.line, f.name, f.verdict) for f in findings(path) if f.verdict != "note"} == expected(source)


def notes(path):
    return [(int(f.line), f.name, f.text) for f in findings(path) if f.verdict == "note"]


USAGE = """\
import apex  # apex: served
from apex import amp, optimizers  # apex.amp: served; apex.optimizers: served
from apex.amp import _amp_state  # apex.amp._amp_state: served
from apex.amp._amp_state import _amp_state as state  # apex.amp._amp_state: served
from apex.optimizers import FP16_Optimizer  # apex.optimizers.FP16_Optimizer: different
from apex.optimizers import NpuFusedSGD  # apex.optimizers.NpuFusedSGD: missing
from apex.parallel import DistributedDataParallel as DDP  # apex.parallel.DistributedDataParallel: served
from apex.parallel.LARC import LARC  # apex.parallel.LARC: served
from apex.fp16_utils import *  # apex.fp16_utils: served
from apex.fp16_utils.fp16_optimizer import FP16_Optimizer as Old  # \
apex.fp16_utils.fp16_optimizer.FP16_Optimizer: served
from apex.multi_tensor_apply import multi_tensor_applier  # apex.multi_tensor_apply.multi_tensor_applier: served
import amp_C  # amp_C: served

model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="128.0")  # apex.amp.initialize: served
[G, D], [a, b] = apex.amp.initialize(models=[G, D], optimizers=[a, b], num_losses=3)  # apex.amp.initialize: served
amp.initialize(model, **options)  # apex.amp.initialize: served
amp.initialize(model, combine_grad=True)  # apex.amp.initialize: served; apex.amp.initialize(combine_grad=): missing
with amp.scale_loss(loss, optimizer) as scaled_loss:  # apex.amp.scale_loss: served
    scaled_loss.backward(retain_graph=True)
clip_grad_norm_(amp.master_params(optimizer), 1.0)  # apex.amp.master_params: served
"state_dict" in amp.__dict__  # apex.amp.__dict__: served
@amp.half_function  # apex.amp.half_function: served
def f(x): ...
nms = amp.float_function(_C.nms)  # apex.amp.float_function: served
with amp.disable_casts():  # apex.amp.disable_casts: served
    pass
handle = amp.init()  # apex.amp.init: served
optimizer = handle.wrap_optimizer(optimizer)  # apex.amp._amp_state.handle.wrap_optimizer: missing
with handle.scale_loss(loss, optimizer):  # apex.amp._amp_state.handle.scale_loss: missing
    pass

amp._amp_state.loss_scalers[0]._loss_scale = 2**20  # apex.amp._amp_state.loss_scalers._loss_scale: served
if len(state.loss_scalers) == 1:  # apex.amp._amp_state.loss_scalers: served
    scaler = state.loss_scalers[loss_id]  # apex.amp._amp_state.loss_scalers: served
    scaler._scale_seq_len = 100  # apex.amp._amp_state.loss_scalers._scale_seq_len: served
for each in _amp_state.loss_scalers:  # apex.amp._amp_state.loss_scalers: served
    each._unskipped += 1  # apex.amp._amp_state.loss_scalers._unskipped: served
optimizer._lazy_init_maybe_master_weights()  # optimizer._lazy_init_maybe_master_weights: served
optimizer._amp_stash.lazy_init_called = True  # optimizer._amp_stash.lazy_init_called: served
hasattr(self.optimizer, "_amp_stash")  # optimizer._amp_stash: served
stash = self.optimizers[0]._amp_stash  # optimizer._amp_stash: served
stash.all_fp16_params  # optimizer._amp_stash.all_fp16_params: served
_amp_state.opt_properties.options["master_weights"]  # apex.amp._amp_state.opt_properties.options: served
amp.frontend.Properties().options  # apex.amp._amp_state.opt_properties.options: served; \
apex.amp.frontend.Properties: served
amp.frontend.opt_levels["O2"]  # apex.amp.frontend.opt_levels: served
_amp_state.handle.is_active()  # apex.amp._amp_state.handle.is_active: served
_amp_state.allow_incoming_model_not_fp32 = True  # apex.amp._amp_state.allow_incoming_model_not_fp32: different
amp.__version__  # apex.amp.__version__: served
steps, own = 1, apex.amp  # apex.amp: served
own.state_dict()  # apex.amp.state_dict: served

model = DDP(model, delay_allreduce=True)  # apex.parallel.DistributedDataParallel: served
group = apex.parallel.create_syncbn_process_group(2)  # apex.parallel.create_syncbn_process_group: served
model = network_to_half(model)  # apex.fp16_utils.network_to_half: served
optimizer = Old(optimizer, static_loss_scale=128)  # apex.fp16_utils.fp16_optimizer.FP16_Optimizer: served
multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [g])  # apex.multi_tensor_apply.multi_tensor_applier: served; \
amp_C.multi_tensor_l2norm: served
"""


def test_every_name_that_scripts_use_is_reported_at_its_line(script):
    path = script(USAGE.replace("\\\n", ""))
    assert_reported(path, USAGE.replace("\\\n", ""))


@pytest.mark.parametrize(
    "source",
    [
        "import apex.amp as a  # apex.amp: served\na.initialize()  # apex.amp.initialize: served",
        "from apex import amp as A  # apex.amp: served\nA.initialize()  # apex.amp.initialize: served",
        "from apex.amp import *  # apex.amp: served\ninitialize()  # apex.amp.initialize: served",
        'm = __import__("apex")  # apex: served\nm.amp.init()  # apex.amp.init: served',
        'm = __import__("apex.amp")  # apex.amp: served\nm.amp.init()  # apex.amp.init: served',
        "import importlib\n"
        'a = importlib.import_module("apex.amp")  # apex.amp: served\na.init()  # apex.amp.init: served',
        'import apex  # apex: served\ngetattr(apex, "amp").init()  # apex.amp: served; apex.amp.init: served',
        "import apex  # apex: served\namp = apex.amp  # apex.amp: served\namp.init()  # apex.amp.init: served",
        "import apex  # apex: served\nx = apex.amp if y else 0  # apex.amp: served\nx.init()  # apex.amp.init: served",
        "if (a := __import__('apex').amp):  # apex: served; apex.amp: served\n    a.init()  # apex.amp.init: served",
        "def f():\n    from apex import amp  # apex.amp: served\n    amp.init()  # apex.amp.init: served",
        "def f():\n    global amp\n    from apex import amp  # apex.amp: served\namp.init()  # apex.amp.init: served",
        "def g():\n    amp.init()  # apex.amp.init: served\nif x:\n    from apex import amp  # apex.amp: served",
        "try:\n    from apex import amp  # apex.amp: served\nexcept ImportError:\n    amp = None\n"
        "amp.init()  # apex.amp.init: served",
        "class T:\n    def __init__(self):\n        from apex import amp  # apex.amp: served\n        self.amp = amp\n"
        "    def f(self):\n        self.amp.init()  # apex.amp.init: served",
        "from amp_engine import amp  # apex.amp: served\n"
        "amp.init()  # apex.amp.init: served\namp.keep_float(model)\namp.explain()",
        "from apex.optimizers import FusedAdam  # apex.optimizers.FusedAdam: served\n"
        "class Mine(FusedAdam):  # apex.optimizers.FusedAdam: served\n    pass",
        "import apex  # apex: served\nlambda x: apex.amp.init(x[apex.amp.state_dict()])  # apex.amp.init: served; "
        "apex.amp.state_dict: served",
    ],
)
def test_names_are_followed(script, source):
    assert_reported(script(source), source)


@pytest.mark.parametrize(
    "source",
    [
        "from .apex import amp\namp.nothing()",
        "from torch.cuda import amp\namp.GradScaler()",
        "import apexes\nfrom apexes import amp\namp.nothing()",
        "def f(amp):\n    amp.nothing()\nfrom apex import amp  # apex.amp: served",
        "class A:\n    from apex import amp  # apex.amp: served\n    def f(self):\n        amp.nothing()",
        "apex = 3\napex.amp.nothing()",
        "amp = amp\namp.init()",
        "a = b\nb = a\na.init()",
        "# import apex",
        "'''import apex'''",
        "print('apex')",
    ],
)
def test_what_only_looks_like_apex_is_left_alone(script, source):
    assert_reported(script(source), source)


def test_names_of_the_other_package_under_one_name_are_not_taken_for_apexs(script):
    source = """\
try:
    from apex import amp  # apex.amp: served
except ImportError:
    from torch.cuda import amp
amp.GradScaler()
amp.initialize()  # apex.amp.initialize: served
"""
    assert_reported(script(source), source)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("apex.contrib.xentropy.SoftmaxCrossEntropyLoss", "cross_entropy(logits, labels, label_smoothing=..."),
        ("apex.contrib.optimizers.FP16_Optimizer", "apex.fp16_utils"),
        ("apex.transformer.parallel_state", "Megatron-Core"),
        ("apex.pyprof.nvtx.init", "torch.profiler"),
        ("apex.parallel.multiproc", "torchrun"),
        ("apex.optimizers.NpuFusedAdam", "FusedAdam"),
        ("amp_C.multi_tensor_lamb_stage1_cuda", "multi_tensor_lamb"),
    ],
)
def test_what_is_not_served_is_answered_with_what_to_write(script, name, instead):
    module, _, last = name.rpartition(".")
    (finding,) = findings(script(f"from {module} import {last}"))
    assert (finding.name, finding.verdict) == (name, "missing")
    assert instead in finding.text


def test_a_name_that_apex_never_had_may_be_a_typo(script):
    (finding,) = findings(script("from apex.parallel import DistributedDataParalel"))
    assert finding.verdict == "unknown"
    assert finding.text == "not known as a name of apex: a typo of apex.parallel.DistributedDataParallel?"
    (finding,) = findings(script("import apex.zzz"))
    assert finding.text == "not known as a name of apex"


def test_a_keyword_that_is_not_taken_is_reported_where_it_is_written(script):
    path = script("from apex import amp\namp.initialize(\n    model,\n    opt_lvel='O2',\n    foo_bar_baz=1,\n)")
    found = {(f.line, f.name): f.text for f in findings(path) if f.verdict == "missing"}
    assert found == {
        ("4", "apex.amp.initialize(opt_lvel=)"): "apex.amp.initialize takes no such keyword: write opt_level=",
        ("5", "apex.amp.initialize(foo_bar_baz=)"): "apex.amp.initialize takes no such keyword: leave it out",
    }


def test_keywords_of_what_may_be_another_function_are_not_judged(script):
    source = """\
try:
    from apex.optimizers import FusedAdam as Adam
except ImportError:
    from torch.optim import Adam
Adam(params, decoupled_weight_decay=True)
"""
    assert {f.verdict for f in findings(script(source))} == {"served"}


def test_a_row_that_says_otherwise_changes_the_verdict(script, monkeypatch):
    path = script("from apex import amp\namp.initialize(model)")
    row = inventory.Row("apex.amp.initialize", "missing", "write something else")
    monkeypatch.setitem(inventory.ROWS, "apex.amp.initialize", row)
    assert [(f.verdict, f.text) for f in findings(path)] == [("served", ""), ("missing", "write something else")]
    monkeypatch.delitem(inventory.ROWS, "apex.amp.initialize")
    assert [f.verdict for f in findings(path)] == ["served", "unknown"]


# --- notes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probe",
    [
        "import importlib.util\nx = importlib.util.find_spec('apex') is not None",
        "from importlib.util import find_spec\nx = find_spec('apex.amp') is not None",
        "import importlib.metadata\nx = importlib.metadata.version('apex')",
        "import importlib.metadata as m\nx = m.distribution('apex')",
    ],
)
def test_probes_are_told_to_be_answered(script, probe):
    ((line, _, text),) = notes(script(probe))
    assert (line, text) == (2, "finds apex once amp_engine.apex.install is imported")


START = (
    "from apex import amp\nimport torch\nimport torch.nn.functional as F\nfrom torch.nn.utils import clip_grad_norm_\n"
)
SCALED = "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\n"
O2 = "m, o = amp.initialize(m, o, opt_level='O2')\n"


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        (f"{SCALED}optimizer.step(closure)", 7, "closure"),
        (f"{SCALED}optimizer.step(closure=closure)", 7, "closure"),
        ("amp.initialize(model, (a, b))", 5, "tuple"),
        ("amp.initialize(model, optimizers=(a, b))", 5, "tuple"),
        ("m = torch.nn.DataParallel(m)\nm, o = amp.initialize(m, o)", 6, "wrap it after"),
        ("if x:\n  m = torch.nn.parallel.DistributedDataParallel(m)\nm, o = amp.initialize(m, o)", 7, "wrap it after"),
        ("from apex.parallel import DistributedDataParallel as P\nm = P(m)\namp.initialize(m, o)", 7, "wrap it after"),
        ("amp.initialize(m, o)\nF.binary_cross_entropy(x, y)", 6, "binary_cross_entropy_with_logits"),
        ("amp.initialize(m, o, opt_level=args.level)\ntorch.nn.BCELoss()", 6, "BCEWithLogitsLoss"),
        (f"{O2}F.linear(x, m.head.weight)", 6, "write m.head.weight.float()"),
        (f"{O2}y = x @ m.layers[3].weight.t()[:8]", 6, "write m.layers[3].weight.float()"),
        (f"{O2}p = torch.nn.DataParallel(m)\ntorch.matmul(x, p.module.w)", 7, "write p.module.w.float()"),
        (f"{O2}F.conv2d(input=x, weight=m.a.w, bias=m.a.b)", 6, "m.a.w and m.a.b are half"),
        (f"{O2}F.linear(x, m.head.weight, m.head.bias)", 6, "write m.head.weight.float() and m.head.bias.float()"),
        (f"{O2}F.layer_norm(x, (8,), m.n.weight, m.n.bias)", 6, "write m.n.weight.float() and m.n.bias.float()"),
        ("self.m, o = amp.initialize(m, o, opt_level=level)\nF.linear(x, self.m.w)", 6, "write self.m.w.float()"),
        (f"{O2}own = m.state_dict()\nown[k].copy_(v)", 7, "call m.load_state_dict(...)"),
        (
            f"{O2}def f():\n  own = m.module.state_dict()\n  own[k].data.copy_(v)",
            8,
            "m.module.state_dict() gives FP32 copies",
        ),
        (f"{O2}m.state_dict()[k].fill_(1.0)", 6, "call m.load_state_dict(...)"),
        (f"{O2}for k, v in m.state_dict().items():\n  if k in new: v.copy_(new[k])", 7, "does not reach the model"),
        (f"{O2}own = m.state_dict()\nfor v in own.values():\n  v *= decay", 8, "call m.load_state_dict(...)"),
        (f"{O2}own = m.state_dict()\nown[k] += v", 7, "call m.load_state_dict(...)"),
        (f"{O2}own = m.state_dict()\nown[k][:2] = v", 7, "call m.load_state_dict(...)"),
    ],
)
def test_a_trap_gets_a_note_at_its_line(script, source, line, text):
    ((found_line, _, found_text),) = notes(script(START + source))
    assert found_line == line
    assert text in found_text


@pytest.mark.parametrize(
    "source",
    [
        f"{SCALED}optimizer.step()",
        f"{SCALED}optimizer.step(None)",
        f"{SCALED}scheduler.step(epoch)",
        f"{SCALED}progress.step(n)",
        "amp.initialize(model, [a, b])",
        "amp.initialize(model, optimizer)",
        "with amp.scale_loss(loss, (a, b), delay_unscale=True) as s:\n    s.backward()",
        f"{SCALED}clip_grad_norm_(amp.master_params(optimizer), 1.0)",
        f"{SCALED}clip_grad_norm_(model.parameters(), 1.0)",
        "m, o = amp.initialize(m, o)\nm = torch.nn.DataParallel(m)",
        "g = torch.nn.DataParallel(g)\nm, o = amp.initialize(m, o)",
        "def f():\n  m = torch.nn.DataParallel(m)\ndef g():\n  amp.initialize(m, o)",
        "amp.initialize(m, o, opt_level='O2')\nF.binary_cross_entropy(x, y)",
        "amp.initialize(m, o, allow_banned=True)\nF.binary_cross_entropy(x, y)",
        "amp.register_float_function(torch, 'sigmoid')\namp.initialize(m, o)\nF.binary_cross_entropy(x, y)",
        "F.binary_cross_entropy(x, y)",
        "m, o = amp.initialize(m, o, opt_level='O1')\nF.linear(x, m.w)",
        f"{O2}F.linear(x, other.w)",
        f"{O2}F.linear(x.half(), m.w)",
        f"{O2}x @ m.w.float()",
        f"{O2}x @ m.part(y)",
        f"{O2}torch.zeros_like(m.w)",
        f"{O2}m(x) + m.forward(x) + m.a.b(x) + m.layers[3].forward(x)",
        f"{O2}own = m.state_dict()\nown[k].copy_(v)\nm.load_state_dict(own)",
        f"{O2}own = m.state_dict()\nown[k] = v\nown.update(new)",
        f"{O2}own = m.state_dict()\nfor k, v in own.items(): print(v.sum_of(k))\nv.copy_(x)",
        f"{O2}o.state_dict()[k].copy_(v)",
        "m, o = amp.initialize(m, o, opt_level='O1')\nown = m.state_dict()\nown[k].copy_(v)",
        "own = m.state_dict()\nown[k].copy_(v)",
    ],
)
def test_what_is_right_gets_no_note(script, source):
    assert notes(script(START + source)) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("requirements.txt", "torch\napex\n"),
        ("requirements-gpu.txt", "torch\napex==0.1  # amp\n"),
        ("requirements/train.txt", "torch\napex>=0.1\n"),
        ("environment.yml", "dependencies:\n  - apex\n"),
        ("setup.cfg", "install_requires =\n  apex\n"),
        ("pyproject.toml", 'dependencies = [\n  "apex>=0.9",\n]'),
        ("setup.py", "from setuptools import setup\nsetup(name='x', extras_require={'amp': ['torch', 'apex>=0.1']})"),
    ],
)
def test_a_requirement_of_pips_apex_gets_a_note(script, name, source):
    script(source, name)
    ((line, found, text),) = notes(script("", "a.py").parent)
    assert (line, found) == (2, "apex")
    assert "another project" in text


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("requirements.txt", "nvidia-apex\napex-utils\n# apex\napex @ git+https://github.com/NVIDIA/apex\n"),
        ("pyproject.toml", '[project]\nname = "apexes"\n# "apex"\ndependencies = ["nvidia-apex", "torch"]'),
        ("setup.py", "from setuptools import setup\nsetup(name='apex', packages=['apex'])"),
        ("ci.yml", "- apex"),
    ],
)
def test_other_requirements_get_no_note(script, name, source):
    assert findings(script(source, name).parent) == []


def test_a_shell_script_that_launches_with_apex_is_told_of_torchrun(script):
    (finding,) = findings(script("set -e\npython -m apex.parallel.multiproc main.py\n", "run.sh").parent)
    assert (finding.line, finding.verdict) == ("2", "missing")
    assert "torchrun" in finding.text


# --- files ----------------------------------------------------------------------------------------


def test_notebooks_are_read_cell_by_cell(script):
    cells = [
        {"cell_type": "markdown", "source": ["import apex"]},
        {"cell_type": "code", "source": ["!pip install x\n", "%time\n", "from apex import amp\n"]},
        {"cell_type": "code", "source": "print 'broken'"},
        {"cell_type": "code", "source": ["x = 1\n", "amp.scale_los()"]},
    ]
    path = script(json.dumps({"cells": cells}), "a.ipynb")
    assert [(f.line, f.name, f.verdict) for f in findings(path)] == [
        ("3:1", "", "not read"),
        ("2:3", "apex.amp", "served"),
        ("4:2", "apex.amp.scale_los", "unknown"),
    ]


NO_PYTHON = {
    "a shell": ["%%bash\n", "pip install 'apex\n", "for f in *; do echo $f; done\n"],
    "a shell after an empty line": ["\n", "%%sh\n", "ls -l\n"],
    "a file": ["%%writefile notes.txt\n", "it's apex\n"],
    "html": ["%%HTML\n", "<b>apex</b>"],
    "a script": ["%%script false\n", "echo 'apex"],
    "commands": ["!pip install -v ./apex\n", "%cd apex\n", "?len\n", "len?\n", "apex??\n", "!echo '('\n"],
    "commands without their sign": ["pip install apex\n", "cd /content/apex\n", "ls -l"],
    "a command over lines": ["!pip install \\\n", "  --global-option=--cpp_ext \\\n", "  ./apex\n"],
    "what commands give": ["files = !ls *.py\n", "p = %pwd\n", "v = !nvcc --version | grep 'release"],
    "a branch": ["if True:\n", "    !ls -l\n", "else:\n", "    %matplotlib inline\n"],
}


def notebook(script, *cells):
    code = [{"cell_type": "code", "source": cell} for cell in cells]
    return script(json.dumps({"cells": code}), "a.ipynb")


@pytest.mark.parametrize("kind", NO_PYTHON)
def test_what_is_not_python_in_a_notebook_is_passed_over_and_the_rest_is_read(script, kind):
    use = ["from apex import amp\n"]
    path = notebook(script, use, NO_PYTHON[kind], ["amp.scale_los()"])
    expected = [("1:1", "apex.amp", "served"), ("3:1", "apex.amp.scale_los", "unknown")]
    assert [(f.line, f.name, f.verdict) for f in findings(path)] == expected
    if "%%" not in "".join(NO_PYTHON[kind]):
        path = notebook(script, [*use, *NO_PYTHON[kind], "\namp.scale_los()\n"])
        assert [(f.name, f.verdict) for f in findings(path)] == [row[1:] for row in expected]


@pytest.mark.parametrize(
    "first", ["%%time", "%%capture out", "%%timeit -n 1", "%%prun", "%%python", "%%some_extension"]
)
def test_cells_that_go_on_in_python_are_read(script, first):
    path = notebook(script, [f"{first}\n", "from apex import amp\n", "%time amp.scale_los()\n", "%timeit -n 3 f()"])
    assert [(f.line, f.name) for f in findings(path)] == [("1:2", "apex.amp"), ("1:3", "apex.amp.scale_los")]


def test_a_program_that_a_notebook_writes_is_read_by_itself(script):
    writes = ["%%writefile -a train.py\n", "from apex import amp\n", "amp.scale_los()\n"]
    path = notebook(script, ["amp = None"], writes, ["amp.scale_los()"])
    assert [(f.line, f.name) for f in findings(path)] == [("2:2", "apex.amp"), ("2:3", "apex.amp.scale_los")]


def test_lines_of_python_that_look_like_commands_stay(script):
    text = [
        "from apex import amp\n",
        "x = ('%s'\n",
        "  % amp.scale_los())\n",
        's = """\n',
        "!amp\n",
        '%time"""\n',
    ]
    path = notebook(script, text)
    assert [(f.line, f.name) for f in findings(path)] == [("1:1", "apex.amp"), ("1:3", "apex.amp.scale_los")]


def test_a_cell_that_is_broken_python_is_said_by_its_line(script):
    path = notebook(script, ["!ls -l\n", "import apex\n", "print 'broken'\n"])
    assert [(f.line, f.verdict) for f in findings(path)] == [("1:3", "not read")]


def test_pipes_are_not_waited_for(script, tmp_path, capsys):
    script("import apex", "b.py")
    for name in ("a.py", "a.ipynb", "setup.cfg"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    assert [os.path.basename(f.path) for f in findings(tmp_path)] == ["b.py"]
    assert check.main([str(tmp_path / "a.py")]) == 2
    assert "a.py: no such file" in capsys.readouterr().err


def test_folders_that_are_not_the_projects_own_are_skipped(script, tmp_path):
    for folder in (".git", "build", "dist", "site-packages", "venv", ".venv", "__pycache__", "node_modules"):
        script("import apex", f"{folder}/a.py")
    script("home = /usr", "env/pyvenv.cfg")
    script("import apex", "env/a.py")
    script("import apex", "src/.hidden.py")
    script("import apex", "src/deep/b.py")
    assert [os.path.basename(f.path) for f in findings(tmp_path)] == ["b.py"]
    assert [f.verdict for f in findings(tmp_path / "build" / "a.py")] == ["served"]


def test_links_in_a_circle_end(script, tmp_path):
    path = script("import apex", "src/a.py")
    (tmp_path / "src" / "again").symlink_to(tmp_path)
    (tmp_path / "src" / "b.py").symlink_to(path)
    (tmp_path / "src" / "c.py").symlink_to(tmp_path / "nowhere.py")
    assert sorted(f.verdict for f in findings(tmp_path)) == ["not read", "served"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (b"import apex\nprint 'x'\n", "Python 2 is not read"),
        (b"import apex\ntry:\n    x\nexcept A, e:\n    pass\n", "Python 2 is not read"),
        (b"import apex\nx = = 1\n", "invalid syntax"),
        (b"import apex\n'\xff'\n", "utf-8"),
        (b"# -*- coding: nonsense -*-\nimport apex\n", "nonsense"),
        ("import apex".encode("utf-16"), ""),
    ],
)
def test_a_file_that_cannot_be_read_is_said_to_be_and_the_others_are_read(tmp_path, source, text):
    (tmp_path / "a.py").write_bytes(source)
    (tmp_path / "b.py").write_text("import apex")
    broken, read = findings(tmp_path)
    assert (broken.verdict, read.verdict) == ("not read", "served")
    assert text in broken.text
    assert check.main([str(tmp_path)]) == 1


def test_a_program_beyond_the_stack_of_the_parser_is_said_to_be_not_read(tmp_path):
    (tmp_path / "deep.py").write_text("import apex\nx = " + "-" * 20_000 + "1\n")
    (tmp_path / "other.py").write_text("from apex import amp\n")
    assert sorted(f.verdict for f in findings(tmp_path)) == ["not read", "served"]


def test_lines_may_end_as_on_old_macs(tmp_path):
    (tmp_path / "train.py").write_bytes(b"import torch\r\r\rx = 1\rfrom apex import amp\r")
    assert [(f.line, f.verdict) for f in findings(tmp_path)] == [("5", "served")]


def test_a_file_in_another_encoding_that_says_so_is_read(tmp_path):
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\n# é\nimport apex\n".encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfimport apex\r\n")
    assert [(f.line, f.verdict) for f in findings(tmp_path)] == [("3", "served"), ("1", "served")]


def test_a_broken_file_that_does_not_mention_apex_is_no_news(script):
    assert findings(script("print 'x'")) == []


def test_nothing_of_the_project_is_run(script, tmp_path, capsys):
    script("import apex\nraise SystemExit(9)\n", "mine.py")
    script("raise SystemExit(9)\n", "apex.py")
    assert check.main([str(tmp_path)]) == 0
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mine")


def test_names_that_are_bound_to_one_another_many_times_are_resolved_once(script):
    lines = ["import apex", *(f"x{i % 9} = x{(i * 7 + 1) % 9}.f(x{(i * 5 + 2) % 9})" for i in range(400)), "x1.y"]
    assert [f.name for f in findings(script("\n".join(lines)))] == ["apex"]


# --- report ---------------------------------------------------------------------------------------


def test_everything_served_is_exit_code_0(script, capsys):
    path = script("from apex import amp\namp.initialize(model)\n")
    assert check.main([str(path)]) == 0
    assert capsys.readouterr().out == (
        f"{path}:1  apex.amp             served\n"
        f"{path}:2  apex.amp.initialize  served\n"
        "\n"
        "2 names of apex in 1 file: 2 served.  Now write `from amp_engine import amp` for `from apex import amp`; or "
        "leave the imports alone and type `python -m amp_engine.apex train.py` in place of `python train.py`.\n"
    )


def test_json_has_each_use(script, capsys):
    path = str(script("from apex import amp\namp.frob()\n"))
    assert check.main(["--json", path]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["is_answered"]) == (1, False)
    assert found["uses"][0] == {"path": path, "line": "1", "name": "apex.amp", "verdict": "served", "text": ""}
    assert [use["verdict"] for use in found["uses"]] == ["served", "unknown"]


@pytest.mark.parametrize(
    "text",
    [
        "import amp_engine.apex.install\nfrom apex import amp\n",
        "from amp_engine import amp\nfrom amp_engine.apex.optimizers import FusedAdam\n",
    ],
)
def test_where_each_import_is_answered_nothing_is_left_to_do(script, capsys, text):
    assert check.main([str(script(text, "done.py"))]) == 0
    assert "Nothing is left to do: amp_engine answers each import.\n" in capsys.readouterr().out
    other = script("from apex import amp\n", "other.py")
    check.main([str(other.parent)])
    assert "Nothing is left to do" not in capsys.readouterr().out


def test_a_notebook_and_a_link_to_nowhere_leave_something_to_do(script, capsys):
    cell = {"cell_type": "code", "source": ["from apex import amp\n"]}
    notebook = script(json.dumps({"cells": [cell], "metadata": {}}), "done.ipynb")
    assert check.main([str(notebook)]) == 0
    assert "Nothing is left to do" not in capsys.readouterr().out
    cell["source"].insert(0, "import amp_engine.apex.install\n")
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}}))
    assert check.main([str(notebook)]) == 0
    assert "Nothing is left to do" in capsys.readouterr().out
    (notebook.parent / "gone.py").symlink_to("nowhere.py")
    assert check.main([str(notebook.parent)]) == 1
    out = capsys.readouterr().out
    assert "not read" in out
    assert "Nothing is left to do" not in out


def test_a_script_without_a_suffix_and_one_that_a_cell_writes_leave_something_to_do(script, capsys):
    cell = {"cell_type": "code", "source": ["%%writefile train.py\n", "from apex import amp\n"]}
    notebook = json.dumps({"cells": [cell], "metadata": {}})
    for source, name in (("from apex import amp\n", "train"), (notebook, "writes.ipynb")):
        assert check.main([str(script(source, name))]) == 0
        assert "Nothing is left to do" not in capsys.readouterr().out


def test_something_missing_is_exit_code_1(script, capsys):
    script("from apex.RNN import LSTM\n", "a.py")
    path = script("from apex.optimizers import FusedAdam\n", "b.py").parent
    assert check.main([str(path)]) == 1
    assert capsys.readouterr().out == (
        f"{path}/a.py:1  apex.RNN.LSTM  missing  write torch.nn.LSTM, GRU or RNN\n"
        "\n"
        f"{path}/b.py:1  apex.optimizers.FusedAdam  served\n"
        "\n"
        "2 names of apex in 2 files: 1 served, 1 missing.  Write what stands beside the missing names, then run "
        "`python -m amp_engine.apex train.py` in place of `python train.py`; or, for good, type --fix in place of "
        "--check, which puts `import amp_engine.apex.install` before the first import of apex.  Files that use "
        "apex.amp alone can write `from amp_engine import amp`.\n"
    )


def test_notes_alone_are_exit_code_0(script):
    assert check.main([str(script("apex\n", "requirements.txt"))]) == 0


def test_no_use_of_apex_is_said(script, capsys):
    assert check.main([str(script("import torch"))]) == 0
    said = "No use of apex in 1 file.  `python -m amp_engine advise train.py` tries amp with any script.\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("paths", [[], ["nowhere"], [__file__, "nowhere"]])
def test_a_path_that_is_not_there_is_exit_code_2_and_says_what_to_type(paths, capsys):
    assert check.main(paths) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "python -m amp_engine.apex --check PATH" in captured.err
    assert ("nowhere: no such file" in captured.err) == ("nowhere" in paths)
