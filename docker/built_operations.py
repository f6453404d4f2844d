"""Fails unless a wheel of DeepSpeed has its operations: WHEEL ACCELERATOR DS_BUILD_X=1 ...

DeepSpeed loads an operation that was built ahead only if it was built for the accelerator of the
run, and compiles it anew otherwise, for which an image without compilers has nothing.
"""

import sys
import zipfile

wheel, accelerator, *wanted = sys.argv[1:]
with zipfile.ZipFile(wheel) as file:
    record = file.read("deepspeed/git_version_info_installed.py").decode()
found: dict = {}
exec(record, found)
on = [one.removesuffix("=1") for one in wanted if one.endswith("=1")]
names = [one.removeprefix("DS_BUILD_").lower().replace("aio", "async_io") for one in on]
missing = [name for name in names if not found["installed_ops"].get(name)]
if found["accelerator_name"] != accelerator or missing:
    sys.exit(
        f"{wheel}: built for {found['accelerator_name']}, not for {accelerator}, or without "
        f"{', '.join(missing) or 'nothing'}"
    )
print(f"operations for {accelerator}: {', '.join(names) or 'none'}")
