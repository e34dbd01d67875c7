"""Rows of `jobs.bench transport`: real actors that send and receive."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import ray
import torch

from dflash_ray.planning import bench
from dflash_ray.transport.channel import Payload, Receiver, Remote, Sender, slot_of
from dflash_ray.transport.peer import Buffer, see_all_gpus
from jobs.support.local_ray import connect

LIMIT = 120


@ray.remote(num_cpus=0, concurrency_groups={"send": 1, "ask": 1})
class Source:
    """Stands for a target: holds one batch's features and sends them again and again."""

    def __init__(self, tokens: int, width: int):
        self.device = bench.bench_device()
        self.features = torch.randn(tokens, width, dtype=torch.bfloat16, device=self.device)
        self.sender = Sender(self.device)

    @ray.method(concurrency_group="send", num_returns=2)
    def send(self) -> tuple[int | None, Payload]:
        self.sender.hold(0, {"features": self.features})
        payload = self.sender.take(0)
        return slot_of(payload), payload

    @ray.method(concurrency_group="ask")
    def release(self, slot: int) -> None:
        self.sender.release(slot)

    @ray.method(concurrency_group="send")
    def offer(self, slots: int) -> tuple[Remote, list[Buffer]]:
        return self.sender.offer(slots, self.features.nbytes), self.sender.buffers

    @ray.method(concurrency_group="ask")
    def direct(self, use: bool) -> None:
        if use:
            self.sender.open_direct()
        else:
            self.sender.close_direct()

    @ray.method(concurrency_group="send")
    def nccl(self, address: str, messages: int) -> None:
        with _nccl(address, 0):
            for _ in range(messages):
                torch.distributed.send(self.features, 1)
            torch.cuda.synchronize()


@ray.remote(num_cpus=0)
class Sink:
    """Stands for the drafter."""

    def __init__(self, tokens: int, width: int):
        see_all_gpus()
        self.device, self.shape = bench.bench_device(), (tokens, width)
        self.receiver = Receiver(self.device)

    def device_name(self) -> str:
        return bench.device_name(self.device)

    def probe(self, message: Remote) -> float:
        return self.receiver.probe(message)

    def receive(self, payload: Payload) -> int:
        return self.receiver.receive(payload)["features"].nbytes

    def nccl(self, address: str, messages: int) -> float:
        features = torch.empty(self.shape, dtype=torch.bfloat16, device=self.device)
        with _nccl(address, 1):
            torch.distributed.recv(features, 0)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(messages - 1):
                torch.distributed.recv(features, 0)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / (messages - 1)


class _nccl:
    def __init__(self, address: str, rank: int):
        self.address, self.rank = address, rank

    def __enter__(self) -> None:
        torch.distributed.init_process_group("nccl", init_method=self.address, rank=self.rank, world_size=2)

    def __exit__(self, *_exc: object) -> None:
        torch.distributed.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record: every row, and the devices it was measured on."""
    connect()
    rows, devices = measure_rows(args)
    return {"job": "transport", "message_bytes": args.tokens * args.width * 2, **devices, "versions": bench.versions(), "rows": rows}


def measure_rows(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    share = (1 / args.sources if gpus > 1 else 1 / (args.sources + 1)) if gpus else 0
    env = {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    sink = Sink.options(num_gpus=1 if gpus > 1 else share, runtime_env=env).remote(args.tokens, args.width)
    devices = {"device": ray.get(sink.device_name.remote(), timeout=LIMIT), "gpus": gpus}
    made = [Source.options(num_gpus=share, runtime_env=env).remote(args.tokens, args.width) for _ in range(args.sources)]
    rows: list[dict[str, Any]] = []

    def add(name: str, seconds: list[float], count: int = 1) -> None:
        each = statistics.median(seconds)
        rate = count * args.tokens * args.width * 2 / each / 1e9
        rows.append({"name": name, "seconds": each, "gigabytes_per_second": rate, "messages": len(seconds)})
        print(f"{name:<48} {each * 1e3:9.1f} ms  {rate:8.2f} GB/s", flush=True)

    def both(way: str) -> None:
        for sources in sorted({1, args.sources}):
            add(f"{way}, {sources} source(s), one at a time", one_at_a_time(made[:sources], sink, args.messages))
            add(f"{way}, {sources} source(s), overlapped", overlapped(made[:sources], sink, args.messages))

    both("object store")
    if gpus:
        try:
            for source in made:
                probe, _ = ray.get(source.offer.remote(3), timeout=LIMIT)
                devices["direct_copy_gigabytes_per_second"] = ray.get(sink.probe.remote(probe), timeout=LIMIT) / 1e9
                ray.get(source.direct.remote(True), timeout=LIMIT)
            both("direct")
        except (ray.exceptions.RayError, RuntimeError) as error:
            devices["direct_failed"] = str(error).strip().splitlines()[-1]
            print(f"direct: {devices['direct_failed']}", flush=True)
    if gpus > 1:
        address = f"file:///tmp/dflash_ray_nccl_{time.time_ns()}"
        made[0].nccl.remote(address, args.messages + 1)
        add("NCCL send and receive, back to back", [ray.get(sink.nccl.remote(address, args.messages + 1), timeout=LIMIT)])
    for actor in (*made, sink):
        ray.kill(actor)
    return rows, devices


def one_at_a_time(sources: list[Any], sink: Any, messages: int) -> list[float]:
    seconds = []
    for index in range(messages + 2):
        began = time.perf_counter()
        source = sources[index % len(sources)]
        slot, payload = source.send.remote()
        ray.get(sink.receive.remote(payload), timeout=LIMIT)
        if (free := ray.get(slot, timeout=LIMIT)) is not None:
            source.release.remote(free)
        if index >= 2:
            seconds.append(time.perf_counter() - began)
    return seconds


def overlapped(sources: list[Any], sink: Any, messages: int) -> list[float]:
    """Every source keeps two messages on the way; seconds per message, the same for all."""
    on_the_way: list[tuple[Any, Any, Any]] = []
    done, began, total = 0, 0.0, messages + 2 * len(sources)
    for index in range(total):
        source = sources[index % len(sources)]
        slot, payload = source.send.remote()
        on_the_way.append((source, slot, sink.receive.remote(payload)))
        del payload
        while len(on_the_way) >= 2 * len(sources) or (index == total - 1 and on_the_way):
            sender, slot, received = on_the_way.pop(0)
            ray.get(received, timeout=LIMIT)
            if (free := ray.get(slot, timeout=LIMIT)) is not None:
                sender.release.remote(free)
            done += 1
            if done == 2 * len(sources):
                began = time.perf_counter()
    return [(time.perf_counter() - began) / messages] * messages
