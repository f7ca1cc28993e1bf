# SPDX-License-Identifier: Apache-2.0

output "corpora" {
  description = "The buckets, as the modules take them, by region's name."
  value       = { writer = module.writer.corpus, us = module.us.corpus, ap = module.ap.corpus }
}

output "ec_transfer_config" {
  description = "The JSON that `vllm serve --ec-transfer-config` takes: those who write, and those who read in each region."
  value = {
    writer = module.writer.ec_transfer_config["ec_both"]
    us     = module.us.ec_transfer_config["ec_consumer"]
    ap     = module.ap.ec_transfer_config["ec_consumer"]
  }
}

output "role_arns" {
  description = "Roles for EKS Pod Identity."
  value = merge(
    { producer = module.producer.role_arn, maintainer = module.maintainer.role_arn },
    { for name, access in module.consumer : "consumer-${name}" => access.role_arn },
  )
}

output "policies" {
  description = "What each role may do, statement by statement, so that a plan shows it before the keys have their ids."
  value = merge(
    {
      producer    = module.producer.statements
      maintainer  = module.maintainer.statements
      replication = module.replication.statements
    },
    { for name, access in module.consumer : "consumer-${name}" => access.statements },
  )
}
