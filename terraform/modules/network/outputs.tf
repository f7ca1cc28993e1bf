# SPDX-License-Identifier: Apache-2.0

output "vpc_endpoint_id" {
  description = "Id of the endpoint, for bucket policies that ask where a request comes from."
  value       = aws_vpc_endpoint.s3.id
}
