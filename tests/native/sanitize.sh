#!/bin/sh
# The stress program and the native tests under a sanitizer:  tests/native/sanitize.sh asan|tsan [pytest arguments]
# PYTHON names the interpreter (python3), BUILD the build folder (build/<lane>).
set -eu
lane=${1:?asan or tsan}
shift
root=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
python=${PYTHON:-python3}
build=${BUILD:-$root/build/$lane}
cxx=${CXX:-c++}
case $lane in
  asan)
    sanitizers=address,undefined runtime=libasan.so
    # Python itself leaves memory behind; the stress program runs with leak detection.
    export ASAN_OPTIONS=abort_on_error=1:detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    ;;
  tsan)
    sanitizers=thread runtime=libtsan.so
    export TSAN_OPTIONS="halt_on_error=1:suppressions=$root/ffi/tests/tsan.supp"
    ;;
  *)
    echo "$lane: asan or tsan" >&2
    exit 2
    ;;
esac
cmake -S "$root/ffi" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DJAXCOLL_TESTS=ON -DJAXCOLL_WITH_XLA=OFF \
  -DJAXCOLL_SANITIZE="$sanitizers" >/dev/null
cmake --build "$build" -j "$(nproc)"
(cd "$build" && ctest --output-on-failure)
cd "$root"
# libstdc++ comes along, or the sanitizer finds no __cxa_throw to intercept.
LD_PRELOAD="$($cxx -print-file-name=$runtime) $($cxx -print-file-name=libstdc++.so)" \
  JAXCOLL_LIBRARY="$build/libjaxcoll.so" "$python" -m pytest tests/native "$@"
