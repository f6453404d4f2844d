# Images of all backends. What they are made of is in the backends' own tables (device.toml), which
# `anygauge doctor`, `anygauge image` and the launchers read, too. This puts them in the place of the
# empty ones here, and starts docker's bake:
#
#   python docker/buildx.py cpu

variable "CPU_RELEASES" {
  default = []
}

variable "CUDA_RELEASES" {
  default = []
}

variable "HPU_RELEASES" {
  default = []
}

# Where images go, such as registry.example.com/team/anygauge; `anygauge image` and the launchers
# look at it, too.
variable "ANYGAUGE_REPOSITORY" {
  default = "anygauge"
}

variable "VERSION" {
  default = "0.2.0"
}

variable "REVISION" {
  default = "unknown"
}

# A repository for layers, such as registry.example.com/cache; empty: no cache but the builder's own.
variable "CACHE" {
  default = ""
}

# A file with pip's settings for a mirror, which then has torch, too; it is in no layer.
variable "PIP_SETTINGS" {
  default = ""
}

group "default" {
  targets = ["cpu"]
}

target "common" {
  context   = "."
  platforms = ["linux/amd64"]
  secret    = PIP_SETTINGS == "" ? [] : ["id=pip,src=${PIP_SETTINGS}"]
}

target "cpu" {
  inherits = ["common"]
  name     = "cpu-${replace(item.name, ".", "-")}"
  matrix = {
    item = [for one in CPU_RELEASES : one if one.built]
  }
  dockerfile = "docker/cpu.Dockerfile"
  args = {
    BASE          = item.base
    TORCH_VERSION = item.versions.torch
    TORCH_INDEX   = PIP_SETTINGS == "" ? item.arguments.index : ""
    VERSION       = VERSION
    REVISION      = REVISION
  }
  labels = {
    "org.opencontainers.image.base.name" = item.base
    "org.opencontainers.image.ref.name"  = "${VERSION}-cpu-${item.name}"
  }
  tags       = ["${ANYGAUGE_REPOSITORY}:${VERSION}-cpu-${item.name}"]
  cache-from = CACHE == "" ? [] : ["type=registry,ref=${CACHE}:cpu-${item.name}"]
  cache-to   = CACHE == "" ? [] : ["type=registry,ref=${CACHE}:cpu-${item.name},mode=max"]
}

target "cuda" {
  inherits = ["common"]
  name     = "cuda-${replace(item.name, ".", "-")}"
  matrix = {
    item = [for one in CUDA_RELEASES : one if one.built]
  }
  dockerfile = "docker/cuda.Dockerfile"
  args = {
    BASE          = item.base
    BUILD_BASE    = item.arguments.build_base
    TORCH_VERSION = item.versions.torch
    ARCHITECTURES = item.arguments.architectures
    VERSION       = VERSION
    REVISION      = REVISION
  }
  labels = {
    "org.opencontainers.image.base.name" = item.base
    "org.opencontainers.image.ref.name"  = "${VERSION}-cuda-${item.name}"
  }
  tags       = ["${ANYGAUGE_REPOSITORY}:${VERSION}-cuda-${item.name}"]
  cache-from = CACHE == "" ? [] : ["type=registry,ref=${CACHE}:cuda-${item.name}"]
  cache-to   = CACHE == "" ? [] : ["type=registry,ref=${CACHE}:cuda-${item.name},mode=max"]
}

target "hpu" {
  inherits = ["common"]
  name     = "hpu-${replace(item.name, ".", "-")}"
  matrix = {
    item = [for one in HPU_RELEASES : one if one.built]
  }
  dockerfile = "docker/hpu.Dockerfile"
  args = {
    BASE           = item.base
    TORCH_VERSION  = item.versions.torch
    DEEPSPEED      = item.versions.deepspeed
    CONSTRAINTS    = item.arguments.constraints
    TRANSFORMERS   = item.arguments.transformers
    OPTIMUM_HABANA = item.arguments.optimum_habana
    VERSION        = VERSION
    REVISION       = REVISION
  }
  labels = {
    "org.opencontainers.image.base.name" = item.base
    "org.opencontainers.image.ref.name"  = "${VERSION}-hpu-${item.name}"
  }
  tags       = ["${ANYGAUGE_REPOSITORY}:${VERSION}-hpu-${item.name}"]
  cache-from = CACHE == "" ? [] : ["type=registry,ref=${CACHE}:hpu-${item.name}"]
  cache-to   = CACHE == "" ? [] : ["type=registry,ref=${CACHE}:hpu-${item.name},mode=max"]
}
