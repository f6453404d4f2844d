"""Pipeline parallelism: ranks compute some of the layers."""
