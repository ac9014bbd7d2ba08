import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import compile_study  # noqa: E402

TEXT = """#include <a.h>
namespace qla {
int helper();
}  // namespace qla
#include <b.h>
extern "C" __global__ void run_kernel(int n);
extern "C" __global__ void __launch_bounds__(512, 1) run_kernel(int n) {
  qla::helper();
}
"""


def test_joined_texts_share_includes_and_no_names():
    lines = compile_study.joined([TEXT, TEXT]).splitlines()
    assert lines[:2] == ["#include <a.h>", "#include <b.h>"]
    assert sum(line.startswith("#include") for line in lines) == 2
    for i in range(2):
        assert lines.count(f"namespace qla_{i} {{") == lines.count(f"  qla_{i}::helper();") == 1
        assert lines.count(f'extern "C" __global__ void __launch_bounds__(512, 1) run_kernel_{i}(int n) {{') == 1


def test_headers_alone_hold_no_kernel_of_the_text():
    assert compile_study.headers_alone(TEXT).startswith("#include <a.h>\n#include <b.h>\n__global__ void")
    assert "run_kernel" not in compile_study.headers_alone(TEXT)
