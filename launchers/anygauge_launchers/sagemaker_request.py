"""The request for a training job, as the service's API has it (CreateTrainingJob)."""

from __future__ import annotations

from anygauge.interface import Job
from anygauge_launchers.sagemaker_options import FileSystem, SagemakerOptions


def request_of(
    job: Job, own: SagemakerOptions, name: str, run: str, carried: dict[str, str]
) -> dict[str, object]:
    """The request for CreateTrainingJob.

    Args:
        job: as its machines see it.
        run: under which its run directory is kept.
        carried: hyperparameters that bring the job there.
    """
    stop: dict[str, int] = {"MaxRuntimeInSeconds": own.time_limit_s}
    if own.max_wait_s is not None:
        stop["MaxWaitTimeInSeconds"] = own.max_wait_s
    resources: dict[str, object] = {
        "InstanceType": own.instance_type,
        "InstanceCount": job.launch.nodes,
        **({} if own.volume_gb is None else {"VolumeSizeInGB": own.volume_gb}),
        **({"KeepAlivePeriodInSeconds": own.keep_alive_s} if own.keep_alive_s else {}),
    }
    request: dict[str, object] = {
        "TrainingJobName": name,
        "RoleArn": own.role,
        "AlgorithmSpecification": {
            "TrainingImage": own.image_for(job),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [own.python, "-m", "anygauge_launchers.sagemaker_node"],
            "ContainerArguments": ["--grace", f"{own.grace_s:g}"],
        },
        "HyperParameters": carried,
        "OutputDataConfig": {"S3OutputPath": own.output},
        "CheckpointConfig": {
            "S3Uri": f"{own.output.rstrip('/')}/{run}",
            "LocalPath": job.run_directory,
        },
        "ResourceConfig": resources,
        "StoppingCondition": stop,
        "EnableManagedSpotTraining": own.spot,
        "EnableInterContainerTrafficEncryption": own.encrypt_traffic,
        "EnableNetworkIsolation": own.network_isolation,
    }
    if own.channels:
        request["InputDataConfig"] = [_channel(n, c, own) for n, c in own.channels.items()]
    if own.subnets:
        request["VpcConfig"] = {"Subnets": own.subnets, "SecurityGroupIds": own.security_groups}
    if own.restarts:
        request["RetryStrategy"] = {"MaximumRetryAttempts": own.restarts}
    if own.tags:
        request["Tags"] = [{"Key": key, "Value": value} for key, value in own.tags.items()]
    return request


def _channel(name: str, source: str | FileSystem, own: SagemakerOptions) -> dict[str, object]:
    if isinstance(source, FileSystem):
        where: dict[str, object] = {
            "FileSystemDataSource": {
                "FileSystemId": source.id,
                "FileSystemAccessMode": source.access,
                "FileSystemType": source.type,
                "DirectoryPath": source.path,
            }
        }
        return {"ChannelName": name, "DataSource": where, "InputMode": "File"}
    where = {
        "S3DataSource": {
            "S3DataType": "S3Prefix",
            "S3Uri": source,
            "S3DataDistributionType": "FullyReplicated",
        }
    }
    return {"ChannelName": name, "DataSource": where, "InputMode": own.channel_mode}
