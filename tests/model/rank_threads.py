"""Ranks of one engine as threads of this process, which cost less than processes do."""

import threading
from multiprocessing import Pipe

import torch
from torch.distributed import HashStore

from engine.model.parallel.follower import follow
from engine.model.parallel.group import hang_up
from engine.model.parallel.leader import Leader
from engine.model.ranks.collectives import join_ranks
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner


class RankThread:
    """A rank other than 0, in a thread: see `Follower`."""

    def __init__(self, rank, store, config):
        self.rank = rank
        self._ours, self._theirs = Pipe()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(store, config), daemon=True)
        self._thread.start()

    def _run(self, store, config):
        try:
            follow(self._theirs, config, join_ranks(store, self.rank, config, torch.device("cpu")))
        finally:
            self._theirs.close()

    def send(self, message):
        with self._sending:
            self._ours.send(message)

    def receive(self):
        return self._ours.recv()

    def death(self):
        return "ended", 0

    def close(self):
        hang_up(self._ours)
        self._thread.join()


def start_rank_threads(config):
    """Return what `start_ranks` returns."""
    store = HashStore()
    others = [RankThread(rank, store, config) for rank in range(1, config.ranks)]
    loaded = load(config, ranks=join_ranks(store, 0, config, torch.device("cpu")))
    for other in others:
        other.receive()
    leader = Leader(ModelRunner(loaded), others)
    leader.start()
    return loaded, leader
