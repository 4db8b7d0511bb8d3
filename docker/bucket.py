"""Make the bucket that the MLflow server keeps artifacts in, where it is not there yet."""

import os

import boto3
from botocore.exceptions import ClientError

s3 = boto3.client("s3", endpoint_url=os.environ["MLFLOW_S3_ENDPOINT_URL"])
try:
    s3.create_bucket(Bucket=os.environ["BUCKET"])
except ClientError as error:
    if error.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
        raise
