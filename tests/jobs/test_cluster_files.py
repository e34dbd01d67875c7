"""ray_cluster.yaml is what Ray's own launcher accepts, for one host and, with two lines changed, for several; so is the manifest."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.support.processes import ROOT

CLUSTER = (ROOT / "ray_cluster.yaml").read_text()


def prepared(text: str) -> dict:
    """As `ray up` sees it: filled with Ray's defaults and held against Ray's schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(text))
    validate_config(config)
    return config


def workers(config: dict) -> tuple[int, int]:
    (kind,) = config["available_node_types"].values()
    return kind["min_workers"], kind["max_workers"]


def test_one_host():
    config = prepared(CLUSTER)
    assert config["provider"] == {"type": "local", "head_ip": "127.0.0.1", "worker_ips": []}
    assert workers(config) == (0, 0)


def test_several_hosts_by_changing_two_lines():
    lines = CLUSTER.splitlines()
    marked = [i for i, line in enumerate(lines) if "several hosts:" in line and not line.startswith("#")]
    assert len(marked) == 2
    lines[marked[0]] = "  head_ip: 10.0.0.1"
    lines[marked[1]] = "  worker_ips: [10.0.0.2, 10.0.0.3]"
    config = prepared("\n".join(lines))
    assert workers(config) == (2, 2) and config["provider"]["worker_ips"] == ["10.0.0.2", "10.0.0.3"]


def test_the_schema_would_notice_a_mistake():
    with pytest.raises(Exception, match="head_start_command"):
        prepared(CLUSTER.replace("head_start_ray_commands", "head_start_commands"))


@pytest.mark.parametrize("part", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_ray_start_takes_the_flags(part):
    from ray.scripts.scripts import start

    command = yaml.safe_load(CLUSTER)[part][-1]
    assert "RAY_AUTH_MODE=token" in command and "RAY_JOB_STOP_WAIT_TIME_S=120" in command
    flags = shlex.split(command[command.index("ray start") :])[2:]
    values = start.make_context("ray start", flags).params  # parses, starts nothing
    assert values["object_store_memory"] == 120_000_000_000
    assert values["head"] == (part == "head_start_ray_commands")
    assert not 10002 <= values["metrics_export_port"] <= 19999, "Ray gives these ports to its workers"


def test_kuberay_manifest():
    text = (ROOT / "docs" / "cluster.md").read_text()
    (manifest,) = re.findall(r"```yaml\n(apiVersion.*?)```", text, re.DOTALL)
    cluster = yaml.safe_load(manifest)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    from importlib.metadata import version

    assert spec["rayVersion"] == version("ray") and spec["authOptions"] == {"mode": "token"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in mounts["/data"]
        shm = mounts["/dev/shm"]["emptyDir"]["sizeLimit"]
        assert int(group["rayStartParams"]["object-store-memory"]) < int(shm.removesuffix("Gi")) * 2**30
    (worker,) = spec["workerGroupSpecs"]
    assert worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    environment = {item["name"]: item["value"] for item in spec["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["RAY_JOB_STOP_WAIT_TIME_S"] == "120"
