#!/bin/sh
# Checks this bundle with nothing but Python's standard library:  sh verify.sh [--key signer.pub] [--install]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "error: $python is not there; set PYTHON to Python 3.10 or later" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "error: $python is too old; set PYTHON to Python 3.10 or later" >&2; exit 1; }
exec "$python" -I -B "$here/tools" "$here" "$@"
