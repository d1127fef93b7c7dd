"""The programs of docs/deploy.md in C and JavaScript act as the model does."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.docs.test_docs import FENCE, ROOT

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
OBSERVATIONS = np.float32([[1, 0, 0], [0.5, 0.25, -2]])


def program(language):
    (found,) = (block[3] for block in FENCE.finditer((ROOT / "docs/deploy.md").read_text()) if block[1] == language)
    return found


@pytest.fixture
def actions(tmp_path):
    """Return the actions of a model in `tmp_path` whose names are those of an exported one."""
    kernel = onnx.numpy_helper.from_array(np.float32([[0.3], [-0.7], [0.1]]), "kernel")
    tensor = functools.partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    node = onnx.helper.make_node("MatMul", ["obs", "kernel"], ["action"])
    inputs, outputs = [tensor("obs", shape=["N", 3])], [tensor("action", shape=["N", 1])]
    graph = onnx.helper.make_graph([node], "policy", inputs, outputs, [kernel])
    path = str(tmp_path / "policy.onnx")
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]), path)
    return runtime.InferenceSession(path).run(None, {"obs": OBSERVATIONS})[0][:, 0]


def test_the_program_in_c(tmp_path, actions):
    folders = [os.environ.get("ONNXRUNTIME_INCLUDE", ""), "/usr/include/onnxruntime", "/usr/local/include/onnxruntime"]
    headers = next((x for x in folders if x and (Path(x) / "onnxruntime_c_api.h").exists()), None)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler `cc`")
    if headers is None:  # no pip package has it
        pytest.skip(
            "onnxruntime_c_api.h is missing: unpack an onnxruntime-linux-x64-*.tgz of the releases of onnxruntime, not "
            f"newer than {runtime.__version__}, and let ONNXRUNTIME_INCLUDE name its folder `include`"
        )
    (library,) = (Path(runtime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # the wheel has neither of these
        (tmp_path / name).symlink_to(library)
    (tmp_path / "controller.c").write_text(program("c"))
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{headers}", f"-L{tmp_path}", "-lonnxruntime", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([compiler, "controller.c", *flags, "-o", "controller"], cwd=tmp_path, check=True)
    lines = "".join(" ".join(map(str, obs)) + "\n" for obs in OBSERVATIONS)
    done = subprocess.run("./controller", cwd=tmp_path, input=lines, capture_output=True, text=True, check=True)
    np.testing.assert_allclose(np.float32(done.stdout.split()), actions, rtol=0, atol=1e-5)


def test_the_page_in_a_browser(tmp_path, actions):
    browser, scripts = shutil.which("chromium"), os.environ.get("ONNXRUNTIME_WEB")
    if browser is None:
        pytest.skip("there is no chromium")
    if scripts is None:
        pytest.skip("run `npm pack onnxruntime-web`, unpack it, and let ONNXRUNTIME_WEB name its folder package/dist")
    for name in re.findall(r"`(ort[-\w.]+)`", (ROOT / "docs/deploy.md").read_text()):
        shutil.copy(Path(scripts) / name, tmp_path)
    (tmp_path / "index.html").write_text(program("html"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/index.html"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        done = subprocess.run([browser, *flags, address], capture_output=True, text=True, check=True, timeout=60)
        server.shutdown()
    shown = re.search(r'<output id="action">([-\d.]+)<', done.stdout)
    assert shown, done.stdout
    assert abs(float(shown[1]) - actions[0]) < 1e-5
