# Images of all backends. The versions are the backends' own, which `anygauge doctor` and
# `anygauge image` read, too:
#
#   docker buildx bake -f docker/docker-bake.hcl \
#     -f backends/anygauge_cpu/releases.json \
#     -f backends/anygauge_cuda/releases.json \
#     -f backends/anygauge_hpu/releases.json cpu

variable "REPOSITORY" {
  default = "anygauge"
}

variable "VERSION" {
  default = "0.1.0"
}

variable "REVISION" {
  default = "unknown"
}

# Such as type=registry,ref=registry.example.com/cache; empty: no cache but the builder's own.
variable "CACHE" {
  default = ""
}

# A file with pip's settings for a mirror; it is in no layer.
variable "PIP_SETTINGS" {
  default = ""
}

group "default" {
  targets = ["cpu"]
}

target "common" {
  context    = "."
  platforms  = ["linux/amd64"]
  cache-from = CACHE == "" ? [] : [CACHE]
  cache-to   = CACHE == "" ? [] : ["${CACHE},mode=max"]
  secret     = PIP_SETTINGS == "" ? [] : ["id=pip,src=${PIP_SETTINGS}"]
}

target "cpu" {
  inherits = ["common"]
  name     = "cpu-${replace(item.release, ".", "-")}"
  matrix = {
    item = CPU_RELEASES
  }
  dockerfile = "docker/cpu.Dockerfile"
  args = {
    BASE          = item.base
    TORCH_VERSION = item.torch
    TORCH_INDEX   = item.index
    VERSION       = VERSION
    REVISION      = REVISION
  }
  tags = ["${REPOSITORY}:${VERSION}-cpu-${item.release}"]
}

target "cuda" {
  inherits = ["common"]
  name     = "cuda-${replace(item.release, ".", "-")}"
  matrix = {
    item = CUDA_RELEASES
  }
  dockerfile = "docker/cuda.Dockerfile"
  args = {
    BASE          = item.base
    TORCH_VERSION = item.torch
    ARCHITECTURES = item.architectures
    VERSION       = VERSION
    REVISION      = REVISION
  }
  tags = ["${REPOSITORY}:${VERSION}-cuda-${item.release}"]
}

target "hpu" {
  inherits = ["common"]
  name     = "hpu-${replace(item.release, ".", "-")}"
  matrix = {
    item = [for one in HPU_RELEASES : one if one.extras != null]
  }
  dockerfile = "docker/hpu.Dockerfile"
  args = {
    BASE          = "${item.base}:latest"
    TORCH_VERSION = item.torch
    DEEPSPEED     = item.deepspeed
    EXTRAS        = item.extras
    VERSION       = VERSION
    REVISION      = REVISION
  }
  tags = ["${REPOSITORY}:${VERSION}-hpu-${item.release}"]
}
