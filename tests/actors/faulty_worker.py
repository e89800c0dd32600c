"""A real worker in a real process to which prompts do what their ids say.

poison  kills the process that reads it
broken  makes the engine raise while it is in a slot
stuck   is never answered
last    is answered, and then the process is killed

A file latencies.json beside the checkpoint, prompt ids to seconds, lets prompts reach the engine late. A file
faults.json, names of workers to faults, says what goes wrong with published weights:

kill    kills the process that checks them
hang    never finishes checking them
damage  gives them another digest
slow    lets every step of the engine take a while

The first two come true once, and the file is gone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import ray

from actors.worker import CONTROL, SamplingWorker


class FaultyWorker(SamplingWorker):
    def start(self):
        description = super().start()
        step, self._broken = self._engine.step, False

        def faulty_step():
            if self._broken:
                raise FloatingPointError("the numbers went away")
            if self._fault() == "slow":
                time.sleep(0.15)
            return step()

        self._engine.step = faulty_step
        return description

    def _fault(self):
        return self._told("faults.json").get(self._name)

    def _told(self, name):
        """What the file says; the test or another worker may remove it at any moment."""
        try:
            return json.loads((Path(self._spec.checkpoint) / name).read_text())
        except FileNotFoundError:
            return {}

    def _checked(self, shipment):
        fault = self._fault()
        if fault in ("kill", "hang"):
            (Path(self._spec.checkpoint) / "faults.json").unlink(missing_ok=True)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        weights, found = super()._checked(shipment)
        return weights, dataclasses.replace(found, weights_digest="00") if fault == "damage" else found

    def serve(self):
        for report in super().serve():
            yield report
            if any(getattr(answer.result, "prompt_id", "") == "last" for answer in report.answers):
                time.sleep(0.3)  # until the answer is on its way
                os.kill(os.getpid(), signal.SIGKILL)

    @ray.method(concurrency_group=CONTROL)
    def submit(self, assignments):
        latencies = self._told("latencies.json")
        for assignment in assignments:
            prompt_id = assignment.request.prompt_id
            if prompt_id == "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            self._broken |= prompt_id == "broken"
            if prompt_id != "stuck":
                threading.Timer(latencies.get(prompt_id, 0), self._inbox.put, [assignment]).start()
