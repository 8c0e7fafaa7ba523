"""Grammars are compiled in a process of their own: what takes too long is killed there, and what comes next
is compiled."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer
from xgrammar import GrammarCompiler, TokenizerInfo

from baton.core.sampling import Grammar, GrammarKind
from engine.compile_process import AGAIN_S
from engine.compiling import (
    CompileFailed,
    CompilerLost,
    CompilerProcess,
    CompilerSetup,
    GrammarCompiled,
    GrammarExceeded,
    GrammarRefused,
    frame,
)
from engine.grammar import REFUSAL_S, SHORTEST, CompilerBusy, GrammarStore
from engine.grammar_compile import GrammarError, compile_grammar
from engine.vocabulary_process import TokenizerUnusable, VocabularyUnread, read_vocabulary
from tests.integration.cluster import eventually
from tests.models import EOS_ID, save_tokenizer

VOCAB = 520
REGEX = Grammar(GrammarKind.REGEX, "[a-c]{2}x")
SLOW = Grammar(
    GrammarKind.EBNF,
    "root ::= r0\n"
    + "\n".join(
        f"r{i} ::= " + "|".join(f"[a-z] r{(i * 7 + j) % 48}" for j in range(20)) + ' | "q"' for i in range(48)
    ),
)
"""It takes a tenth of a second with a vocabulary this small, and many seconds with that of a model in use."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def setup(folder):
    store = GrammarStore(folder, VOCAB, (EOS_ID,))
    return store._setup()


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr("engine.compiling.LOOK_S", 0.02)


@pytest.fixture(scope="module")
def process():
    process = CompilerProcess(compile_s=0.1)
    yield process
    process.close()


def pid_of(process):
    assert process._process is not None
    return process._process.pid


def test_a_process_that_was_started_before_is_the_one_that_compiles(setup):
    process = CompilerProcess(compile_s=10)
    process.start()
    pid = pid_of(process)
    process.start()
    assert isinstance(process.compile(REGEX, lambda: setup), GrammarCompiled)
    assert pid_of(process) == pid
    process.close()
    assert not psutil.pid_exists(pid)
    process.start()
    assert process._process is None, "nothing starts for a worker that ends"


def test_a_process_that_cannot_be_started_is_told_to_the_first_grammar(setup, monkeypatch):
    monkeypatch.setattr("engine.compiling.sys.executable", "/nowhere/python")
    process = CompilerProcess(compile_s=10)
    process.start()
    with pytest.raises(CompilerLost, match="No such file"):
        process.compile(REGEX, lambda: setup)


def test_a_warm_store_has_its_tokenizer_and_its_process(folder):
    process = CompilerProcess(compile_s=10)
    store = GrammarStore(folder, VOCAB, (EOS_ID,), process=process)
    store.warm()
    assert store.has(SHORTEST)
    pid = pid_of(process)
    store.prepare(REGEX)
    assert pid_of(process) == pid
    store.close()


def test_a_model_without_structured_output_warms_nothing_and_still_says_so(tmp_path):
    store = GrammarStore(tmp_path, VOCAB, (EOS_ID,), process=CompilerProcess(compile_s=10))
    store.warm()
    with pytest.raises(GrammarError, match="no structured output"):
        store.prepare(REGEX)
    store.close()


def test_what_takes_too_long_is_killed_and_the_next_is_compiled_by_the_same_process(process, setup):
    assert isinstance(process.compile(REGEX, lambda: setup, times=100), GrammarCompiled)
    pid = pid_of(process)
    answer = process.compile(SLOW, lambda: setup, times=0.1)
    assert isinstance(answer, GrammarExceeded)
    assert "engine.compile_s" in answer.message
    assert isinstance(process.compile(REGEX, lambda: setup, times=100), GrammarCompiled)
    assert pid_of(process) == pid


def test_what_is_wrong_is_refused(process, setup):
    answer = process.compile(Grammar(GrammarKind.REGEX, "(a"), lambda: setup, times=100)
    assert isinstance(answer, GrammarRefused)
    assert "missing ')'" in answer.message


def test_a_process_that_was_killed_is_started_anew(process, setup):
    process.compile(REGEX, lambda: setup, times=100)
    pid = pid_of(process)
    os.kill(pid, signal.SIGKILL)
    process._process.wait()
    assert isinstance(process.compile(REGEX, lambda: setup, times=100), GrammarCompiled)
    assert pid_of(process) != pid


def test_a_process_that_was_stopped_is_given_up_soon_and_replaced(process, setup, quick_looks):
    process.compile(REGEX, lambda: setup, times=100)
    pid = pid_of(process)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CompilerLost, match="hangs, or was stopped"):
        process.compile(REGEX, lambda: setup, times=100)
    assert not psutil.pid_exists(pid)
    assert isinstance(process.compile(REGEX, lambda: setup, times=100), GrammarCompiled)


@pytest.mark.parametrize("hangs_at", ["load", "setup", "job", "fork"])
def test_a_process_that_hangs_anywhere_is_given_up_soon(setup, quick_looks, hangs_at):
    process = CompilerProcess(compile_s=1000, argv=("-c", HANGS, hangs_at))
    much = CompilerSetup("x" * 2**20, 1, has_end=False)  # more than a pipe holds
    with pytest.raises(CompilerLost, match="hangs, or was stopped"):
        process.compile(REGEX, lambda: much)
    assert process._process is None


HANGS = """
import os, signal, sys
from engine.compiling import CompilerReady, frame
import msgspec
def read():
    size = int.from_bytes(sys.stdin.buffer.read(4), "big")
    return sys.stdin.buffer.read(size)
def hang():
    os.kill(os.getpid(), signal.SIGSTOP)
where = sys.argv[1]
if where == "load":
    hang()
read()
if where == "setup":
    hang()
os.write(1, frame(msgspec.msgpack.encode(CompilerReady())))
read()
if where == "fork" and (pid := os.fork()):
    os.waitpid(pid, 0)
hang()
"""


BUSY = """
import os, sys, time
from engine.compiling import LENGTH_BYTES, CompilerReady, frame
import msgspec
def read():
    sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "big"))
read()
if os.fork() == 0:
    while time.process_time() < 0.5:
        pass
    os._exit(0)
os.wait()
os.write(1, frame(msgspec.msgpack.encode(CompilerReady())))
read()
"""


def test_a_process_that_works_for_long_does_not_hang(setup, quick_looks):
    process = CompilerProcess(compile_s=1, argv=("-c", BUSY))
    with pytest.raises(CompilerLost, match="it ended"):
        process.compile(REGEX, lambda: setup)


def test_a_tokenizer_that_cannot_be_read_leaves_no_process():
    def fails():
        raise GrammarError("no tokenizer")

    fresh = CompilerProcess(compile_s=0.1)
    with pytest.raises(GrammarError):
        fresh.compile(REGEX, fails)
    assert fresh._process is None


def test_the_process_has_loaded_no_torch(process, setup):
    process.compile(REGEX, lambda: setup, times=100)
    files = {Path(mapped.path).name for mapped in psutil.Process(pid_of(process)).memory_maps()}
    assert any("xgrammar" in name for name in files)
    assert not [name for name in files if "torch" in name]


def in_another_worker(script):
    """A process that is a worker to its compiler, and has printed the compiler's id."""
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    return worker, int(worker.stdout.readline())


WORKER = """
import sys
from engine.compiling import *
process = CompilerProcess(compile_s=1)
process._started(lambda: CompilerSetup(sys.argv[1], 520, has_end=True))
print(process._process.pid, flush=True)
sys.stdin.read()
"""


def is_over(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_ends_with_its_worker(setup, is_stopped):
    worker, pid = in_another_worker(WORKER.replace("sys.argv[1]", repr(setup.tokenizer)))
    compiler = psutil.Process(pid)
    if is_stopped:
        compiler.suspend()
    with worker:
        worker.kill()
    eventually("the compiler is gone", lambda: is_over(compiler), timeout_s=10)


def test_a_process_whose_worker_is_gone_already_ends():
    other = str(os.getpid() + 1)
    done = subprocess.run([sys.executable, "-m", "engine.compile_process", other], timeout=60, check=True)
    assert done.returncode == 0


ADOPTS = """
import ctypes, os, sys
from engine.compiling import *
ctypes.CDLL(None).prctl(36, 1)  # what process 1 of a container is without asking
forks = "import os, signal; pid = os.fork(); pid or signal.pause(); os.write(1, b'....'); signal.pause()"
process = CompilerProcess(compile_s=1, argv=("-c", forks))
child = process._process = subprocess.Popen(
    [sys.executable, "-c", forks], stdin=-1, stdout=-1, start_new_session=True
)
child.stdout.read(4)
process.close()
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print(0)
"""


def test_a_worker_that_adopts_orphans_takes_the_status_of_killed_forks(setup):
    worker, left = in_another_worker(ADOPTS)
    worker.communicate(timeout=10)
    assert left == 0


ENDS = "import sys; sys.stdin.buffer.read(4)"
NONSENSE = (
    "import sys; sys.stdout.buffer.write(bytes([0, 0, 0, 1, 193])); sys.stdout.flush(); sys.stdin.read()"
)


@pytest.mark.parametrize("script", [ENDS, NONSENSE], ids=["ends", "nonsense"])
def test_a_process_that_ends_or_talks_nonsense_is_lost(setup, script):
    process = CompilerProcess(compile_s=1, argv=("-c", script))
    with pytest.raises(CompilerLost):
        process.compile(REGEX, lambda: setup)
    assert process._process is None


def test_nothing_is_started_after_the_end(setup):
    process = CompilerProcess(compile_s=1)
    process.close()
    with pytest.raises(CompilerLost, match="ends"):
        process.compile(REGEX, lambda: setup)


class Process:
    """Answers as the test says."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    def compile(self, grammar, setup, *, times=1.0):
        assert isinstance(setup(), CompilerSetup)
        self.calls.append(times)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def mask_after(store, grammar, tokens):
    matcher = store.matcher(grammar, (EOS_ID,))
    for token in tokens:
        assert matcher.accept(token)
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    matcher.fill(mask)
    return mask.tolist()


def test_a_vocabulary_is_read_by_another_process_as_it_would_be_here(folder):
    here = TokenizerInfo.from_huggingface(
        AutoTokenizer.from_pretrained(folder), vocab_size=VOCAB, stop_token_ids=[EOS_ID]
    )
    assert read_vocabulary(folder, VOCAB, (EOS_ID,)) == here.serialize_json()
    assert GrammarStore(folder, VOCAB, (EOS_ID,))._load().serialize_json() == here.serialize_json()


def test_a_worker_needs_no_transformers_for_its_grammars(folder):
    """They cost it a second of its processor and 100 MB."""
    code = f"""
import sys, torch
from pathlib import Path
from baton.core.sampling import Grammar, GrammarKind
from engine.grammar import GrammarStore
store = GrammarStore(Path({str(folder)!r}), {VOCAB}, ({EOS_ID},))
grammar = Grammar(GrammarKind.REGEX, "[a-c]x")
store.prepare(grammar)
assert store.matcher(grammar, ({EOS_ID},)) is not None
assert "transformers" not in sys.modules
import transformers
assert transformers.AutoTokenizer.from_pretrained({str(folder)!r}) is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_vocabulary_that_is_not_read_is_tried_again(folder, monkeypatch):
    def unread(*_):
        raise VocabularyUnread("killed")

    store = GrammarStore(folder, VOCAB, (EOS_ID,))
    with monkeypatch.context() as patch:
        patch.setattr("engine.grammar.vocabulary_of", unread)
        with pytest.raises(CompilerBusy, match="not read: killed"):
            store.prepare(REGEX)
    store.prepare(REGEX)
    assert store.has(REGEX)


def test_a_broken_vocabulary_in_the_cache_is_read_anew(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    first = GrammarStore(folder, VOCAB, (EOS_ID,))._load().serialize_json()
    [file] = (tmp_path / "vocabularies").iterdir()
    for broken in ("", "{", "[1]", first[: len(first) // 2]):
        file.write_text(broken)
        assert GrammarStore(folder, VOCAB, (EOS_ID,))._load().serialize_json() == first
        assert file.read_text() == first


def test_a_folder_without_a_tokenizer_says_why_in_one_line(tmp_path):
    with pytest.raises(TokenizerUnusable) as raised:
        read_vocabulary(tmp_path, VOCAB, (EOS_ID,))
    assert "\n" not in str(raised.value)
    with pytest.raises(GrammarError, match="no structured output: "):
        GrammarStore(tmp_path, VOCAB, (EOS_ID,)).prepare(REGEX)


def test_a_compiled_grammar_comes_back_as_it_was(folder, setup):
    info = TokenizerInfo.deserialize_json(setup.tokenizer)
    text = compile_grammar(GrammarCompiler(info, max_threads=1), REGEX).serialize_json()
    here, there = (
        GrammarStore(folder, VOCAB, (EOS_ID,)),
        GrammarStore(folder, VOCAB, (EOS_ID,), process=Process(GrammarCompiled(text))),
    )
    for store in (here, there):
        store.prepare(REGEX)
    token = next(i for i in range(VOCAB) if here.matcher(REGEX, (EOS_ID,)).accept(i))
    for tokens in ((), (token,)):
        assert mask_after(here, REGEX, tokens) == mask_after(there, REGEX, tokens)


def test_a_grammar_that_took_too_long_is_not_tried_again_for_a_while(folder):
    now_s = [0.0]
    process = Process(GrammarExceeded("too long"), GrammarExceeded("too long"))
    store = GrammarStore(folder, VOCAB, (EOS_ID,), process=process, now=lambda: now_s[0])
    for _ in range(3):
        with pytest.raises(GrammarError, match="too long"):
            store.prepare(SLOW)
    assert len(process.calls) == 1
    now_s[0] = REFUSAL_S
    with pytest.raises(GrammarError, match="too long"):
        store.prepare(SLOW)
    assert len(process.calls) == 2


@pytest.mark.parametrize(
    "answer", [CompilerLost("gone"), CompileFailed("status -9")], ids=["lost", "unlucky"]
)
def test_a_lost_compiler_says_nothing_of_the_grammar(folder, answer):
    process = Process(answer, GrammarCompiled(""))
    store = GrammarStore(folder, VOCAB, (EOS_ID,), process=process)
    with pytest.raises(CompilerBusy):
        store.prepare(REGEX)
    store.prepare(REGEX)
    assert store.has(REGEX)


def test_a_text_that_has_begun_elsewhere_has_more_time(folder):
    process = Process(GrammarCompiled(""))
    GrammarStore(folder, VOCAB, (EOS_ID,), process=process).prepare(REGEX, is_continued=True)
    assert process.calls == [3.0]


def test_what_is_read_from_the_process_is_what_took_long():
    assert 0 < AGAIN_S <= 1


def test_a_compiler_whose_worker_is_gone_ends_without_a_word(setup):
    with subprocess.Popen(
        [sys.executable, "-m", "engine.compile_process", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(frame(msgspec.msgpack.encode(setup)))
        process.stdin.close()
        assert process.stderr.read() == b""
