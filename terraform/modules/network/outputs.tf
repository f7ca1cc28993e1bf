# SPDX-License-Identifier: Apache-2.0

output "vpc_endpoint_ids" {
  description = "Ids of the endpoints, for `network_access` of the corpus-bucket module."
  value       = concat([aws_vpc_endpoint.s3.id], aws_vpc_endpoint.interface[*].id)
}

output "interface_endpoint_url" {
  description = "What engines beyond the VPC set as `endpoint_url` where S3's own names do not lead to the interface endpoint; null without one."
  value       = one([for endpoint in aws_vpc_endpoint.interface : "https://bucket.${trimprefix(endpoint.dns_entry[0].dns_name, "*.")}"])
}
