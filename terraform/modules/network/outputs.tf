# SPDX-License-Identifier: Apache-2.0

output "vpc_endpoint_id" {
  description = "Id of the endpoint, for `network_access` of the corpus-bucket module."
  value       = aws_vpc_endpoint.s3.id
}
