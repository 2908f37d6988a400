"""The headers of XLA's FFI, taken from the jaxlib that a Python interpreter has installed."""

_FIND = "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"

_BUILD = """
cc_library(
    name = "ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _jaxlib_headers_impl(ctx):
    root = ctx.path(Label("//:WORKSPACE")).dirname
    python = ctx.path("%s/%s" % (root, ctx.attr.python))
    if not python.exists:
        fail("no %s: run `make venv` first; the headers of XLA's FFI come from its jaxlib" % python)
    result = ctx.execute([python, "-c", _FIND])
    if result.return_code != 0:
        fail("%s has no jaxlib: run `make venv` first\n%s" % (python, result.stderr))
    ctx.symlink(result.stdout.strip() + "/include", "include")
    ctx.file("BUILD", _BUILD)

jaxlib_headers = repository_rule(
    implementation = _jaxlib_headers_impl,
    doc = "A cc_library `ffi` with jaxlib's headers.",
    attrs = {"python": attr.string(
        mandatory = True,
        doc = "Interpreter that has jaxlib, relative to the workspace.",
    )},
    local = True,
)
