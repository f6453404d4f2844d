"""Made by the original's C++."""


def join_pending_pipeline_threads():
    pass
