"""`python -m amp_engine.apex script.py`: what python does with the script, and an apex."""

import signal
import subprocess
import sys
import zipfile

import pytest

from tests.apex.trees import REAL, amp_engine_tree, nvidia_apex, pyramid_apex, python, write

RUN = ("-m", "amp_engine.apex")

# Everything that a program can see of how it was started.
REPORT = """
    import sys
    __spec__ = __spec__ and (__spec__.name, __spec__.origin)
    print(__name__, globals().get("__file__"), __package__, __spec__, sorted(globals()))
    print(sys.argv, sys.path, sys.flags, sys.warnoptions, sys._xoptions, sys.stdout.write_through)
    print(sys.modules["__main__"].__dict__ is globals(), "amp_engine" in sys.modules)
"""


@pytest.fixture
def tree(tmp_path):
    return amp_engine_tree(tmp_path / "tree")


@pytest.fixture
def work(tmp_path):
    """A directory with one program in every form that python runs."""
    work = write(
        tmp_path / "work", dict.fromkeys(("train.py", "pkg/__main__.py", "pkg/module.py", "dir/__main__.py"), REPORT)
    )
    write(work, {"pkg/__init__.py": ""})
    (work / "links").mkdir()
    (work / "links/link.py").symlink_to(work / "train.py")
    with zipfile.ZipFile(work / "program.zip", "w") as archive:
        archive.write(work / "dir/__main__.py", "__main__.py")
    return work


def both(tree, work, target, *, options=(), prefix=(), **settings):
    """The outcomes of `python target` and of `python -m amp_engine.apex target`."""
    plain, ours = (
        python(*options, *words, *target, path=[tree], cwd=work, check=False, **settings)
        for words in ((), (*RUN, *prefix))
    )
    return [(done.stdout, done.stderr, done.returncode) for done in (plain, ours)]


@pytest.mark.parametrize(
    "target",
    [
        ["train.py"],
        ["./train.py", "--replace", "-h", "--check"],
        ["links/link.py"],
        ["-m", "pkg", "-x"],
        ["-m", "pkg.module", "--no-children"],
        ["dir", "a b"],
        ["program.zip"],
        ["-c", REPORT.replace("\n    ", "\n"), "-m", "x"],
        ["-"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_sees_under_python(tree, work, target):
    source = {"input": REPORT.replace("\n    ", "\n")} if target == ["-"] else {}
    plain, ours = both(tree, work, target, **source)
    assert plain[2] == 0
    assert ours == plain


@pytest.mark.parametrize(
    "options", [["-u"], ["-W", "error", "-O"], ["-X", "dev", "-s"], ["-bB", "-X", "utf8=0"]], ids=" ".join
)
def test_the_options_of_python_reach_the_program(tree, work, options):
    plain, ours = both(tree, work, ["train.py"], options=options)
    assert ours == plain


@pytest.mark.parametrize(
    "words", [["-um", "amp_engine.apex"], ["-mamp_engine.apex"], ["-umamp_engine.apex"]], ids=" ".join
)
def test_options_may_be_written_together(tree, work, words):
    plain = python(*(["-u"] if "u" in words[0][:3] else []), "train.py", path=[tree], cwd=work)
    assert python(*words, "train.py", path=[tree], cwd=work).stdout == plain.stdout


ENDS = {
    "an error": "def f():\n    raise ValueError('x')\nf()",
    "an error of syntax": "x = = 1",
    "a status": "import sys; sys.exit(7)",
    "a message": "raise SystemExit('stopped')",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})",
    "an exit function": "import atexit, pickle\nclass A: pass\natexit.register(lambda: print(len(pickle.dumps(A()))))",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_a_program_ends_as_it_ends_under_python(tree, work, code):
    write(work, {"end.py": code})
    plain, ours = both(tree, work, ["end.py"])
    assert ours == plain


APEX = "import apex\nprint(apex.__name__)\n"


def test_apex_is_there_and_in_child_processes(tree, work):
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import apex; print(apex.__name__)'])\n"
    write(work, {"apex_here.py": APEX + child})
    assert python(*RUN, "apex_here.py", path=[tree], cwd=work).stdout.split() == ["amp_engine.apex"] * 2
    alone = python(*RUN, "--no-children", "apex_here.py", path=[tree], cwd=work)
    assert alone.stdout == "amp_engine.apex\n"
    assert "No module named 'apex'" in alone.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_functions_of_the_script_run_in_processes_of_multiprocessing(tree, work, method):
    code = """
        import multiprocessing
        def work(x):
            import apex
            return apex.__name__, __name__, x
        if __name__ == "__main__":
            with multiprocessing.get_context("METHOD").Pool(1) as pool:
                print(*pool.map(work, [3]))
    """
    write(work, {"processes.py": code.replace("METHOD", method)})
    assert python(*RUN, "processes.py", path=[tree], cwd=work).stdout == "('amp_engine.apex', '__mp_main__', 3)\n"


@pytest.mark.parametrize(("options", "name"), [((), "apex"), (("--replace",), "amp_engine.apex")])
def test_an_apex_beside_the_script_that_has_amp_is_replaced_only_when_asked(tree, work, options, name):
    nvidia_apex(work / "inner", amp=True)
    write(work, {"inner/use.py": APEX})
    done = python(*RUN, *options, "inner/use.py", path=[tree], cwd=work)
    assert done.stdout == f"{name}\n"
    assert done.stderr.startswith(f"amp_engine.apex: `import apex` is {'the apex at' if name == 'apex' else name}")
    assert done.stderr.count("\n") == 1


def test_an_unrelated_apex_is_hidden_and_named_once(tree, work):
    pyramid_apex(work)
    write(work, {"use.py": APEX + "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import apex'])\n"})
    done = python(*RUN, "use.py", path=[tree], cwd=work)
    assert done.stdout == "amp_engine.apex\n"
    assert done.stderr.count("not NVIDIA's apex and is hidden") == done.stderr.count("\n") == 1


COMPLAINTS = {
    (
        "--replase",
        "train.py",
    ): "no option --replase: there are --replace, --no-children, --local_rank, --check, --fix, --undo, -m and -c",
    ("trian.py",): "no file 'trian.py' in ",
    ("pkg/modul.py",): "a module is run by `-m pkg.modul`",
    ("-m",): "-m needs a module after it",
    ("--replace", "-c"): "-c needs code after it",
    ("--check",): "--check needs files or directories",
}


@pytest.mark.parametrize(("arguments", "complaint"), COMPLAINTS.items(), ids=str)
def test_a_wrong_command_says_what_is_wrong(tree, work, arguments, complaint):
    done = python(*RUN, *arguments, path=[tree], cwd=work, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert complaint in done.stderr


@pytest.mark.parametrize("option", ["-E", "-S", "-I"])
def test_a_python_that_reads_no_sitecustomize_is_refused(tree, work, option):
    code = f"import runpy, sys; sys.path.insert(0, {str(tree)!r}); sys.argv = ['', 'train.py']"
    run = "; runpy.run_module('amp_engine.apex', run_name='__main__', alter_sys=True)"
    done = python(option, "-c", code + run, cwd=work, check=False)
    assert done.returncode == 2
    assert "import amp_engine.apex.install" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--replace"]])
def test_without_a_program_it_prints_its_use_and_who_answers(tree, work, arguments):
    nvidia_apex(work, amp=True)
    out = python(*RUN, *arguments, path=[tree], cwd=work).stdout
    assert "python -m amp_engine.apex [--replace] [--no-children] script.py" in out
    if arguments != ["--help"]:
        who = f"amp_engine.apex ({tree}" if arguments else f"the apex at {work}"
        assert f"Here `import apex` is {who}" in out


def test_check_hands_the_paths_on(tree, work):
    done = python(*RUN, "--check", "a", "--replace", path=[tree], cwd=work, check=False)
    assert (done.stdout, done.returncode) == ("checked ['a', '--replace']\n", 5)


def test_tools_that_run_programs_run_one_with_apex(tree, work):
    write(work, {"use.py": APEX})
    for words in ([*RUN, "-m", "cProfile"], ["-m", "cProfile", *RUN]):
        out = python(*words, "use.py", path=[tree], cwd=work).stdout
        assert out.startswith("amp_engine.apex\n")
        assert "use.py:1(<module>)" in out


TRAIN = """
import torch
import torch.distributed as dist
from apex import amp

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        import apex.amp
        return float(apex.amp is __import__("amp_engine.apex.amp").apex.amp)

if __name__ == "__main__":
    import sys
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    loader = torch.utils.data.DataLoader(Data(), 2, num_workers=1)
    for served in loader:
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    dist.all_reduce(served)
    print(served.tolist(), sys.argv[1:])
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "expected"), [("1", "--local_rank=1"), (None, "--local_rank=0")])
def test_a_program_is_handed_its_local_rank_where_that_is_asked_for(tree, work, rank, expected):
    settings = {} if rank is None else {"LOCAL_RANK": rank}
    code = "import sys; print(sys.argv[1:])"
    done = python(*RUN, "--local_rank", "-c", code, "--lr=1", path=[tree], cwd=work, env=settings)
    assert done.stdout.strip() == f"['--lr=1', '{expected}']"


@pytest.mark.slow
def test_an_unmodified_script_trains_under_torchrun(tmp_path):
    write(tmp_path, {"train.py": TRAIN})
    # A file for each rank: lines that two of them write to one pipe can run into each other.
    logs = tmp_path / "logs"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--redirects=3", "--log-dir", logs]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "amp_engine.apex", tmp_path / "train.py", "--lr", "1"],
        cwd=REAL.parents[1],
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr + "".join(log.read_text() for log in logs.rglob("stderr.log"))
    assert [log.read_text() for log in logs.rglob("stdout.log")] == ["[2.0, 2.0] ['--lr', '1']\n"] * 2
