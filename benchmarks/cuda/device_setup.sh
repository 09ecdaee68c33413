# Sourced on an offline machine: wheels of what is missing there lie in the folder .whl,
# and the checkout itself is put on the path as the package, with its entry points.
set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || return 1
mkdir -p /tmp/site/headrace /tmp/site/headrace-0.1.0.dist-info
for top in cli engine platforms; do ln -sfn "$PWD/$top" "/tmp/site/headrace/$top"; done
printf 'Metadata-Version: 2.1\nName: headrace\nVersion: 0.1.0\n' > /tmp/site/headrace-0.1.0.dist-info/METADATA
python3 - <<'PYTHON'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
platforms = {"cuda": "headrace.platforms.cuda.platform:CudaPlatform"}
platforms |= project["entry-points"]["headrace.platforms"]
lines = ["[headrace.platforms]", *(f"{name} = {target}" for name, target in platforms.items())]
open("/tmp/site/headrace-0.1.0.dist-info/entry_points.txt", "w").write("\n".join(lines) + "\n")
PYTHON
export PYTHONPATH="/tmp/site:$PWD" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
