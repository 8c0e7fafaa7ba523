"""An expert rank as a process that tests kill and stop.

`main`, which `tests.forked` calls in a process of its own, prints the rank's reference as JSON, then "ok" for
every line of expert numbers that it has loaded. "drop N …" drops experts.
"""

import sys

import msgspec

from baton.config import EngineConfig, ModelConfig
from baton.config.experts import ExpertsConfig
from baton.core.ids import ExpertRankId
from engine.experts.rank import ExpertRankEngine


def main(folder: str, name: str) -> None:
    engine = EngineConfig(kernels="native", threads=1, block_tokens=16)
    rank = ExpertRankEngine.load(ModelConfig(path=folder), engine, ExpertsConfig(), slots=64)
    ref = rank.start(host="127.0.0.1", rank_id=ExpertRankId(name))
    print(msgspec.json.encode(ref).decode(), flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "drop":
            for expert in words[1:]:
                rank.drop_expert(int(expert))
        else:
            for expert in words:
                rank.load_expert(int(expert))
        print("ok", flush=True)
    rank.close()
