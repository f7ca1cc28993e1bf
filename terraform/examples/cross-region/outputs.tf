# SPDX-License-Identifier: Apache-2.0

output "corpora" {
  description = "The buckets, as the modules take them, by region's name."
  value       = { home = module.home.corpus, us = module.us.corpus, ap = module.ap.corpus }
}

output "ec_transfer_config" {
  description = "The JSON that `vllm serve --ec-transfer-config` takes, for the engines of each region, and for the jobs of the maintainer."
  value = {
    for name, one in module.transfer_config :
    name => one.ec_transfer_config[lookup(local.roles, name, "maintainer") == "consumer" ? "ec_consumer" : "ec_both"]
  }
}

output "role_arns" {
  description = "Roles for EKS Pod Identity."
  value = {
    home       = module.engines_home.role_arn
    us         = module.engines_us.role_arn
    ap         = module.engines_ap.role_arn
    maintainer = module.maintainer.role_arn
  }
}

output "policies" {
  description = "What each role may do, statement by statement, so that a plan shows it before the keys have their ids."
  value = {
    home        = module.engines_home.statements
    us          = module.engines_us.statements
    ap          = module.engines_ap.statements
    maintainer  = module.maintainer.statements
    replication = module.replication.statements
  }
}

output "batch_copy_job" {
  description = "What `aws s3control create-job --cli-input-json` takes, in home's region, to copy what was there before; null without `batch_copy`."
  value       = module.replication.batch_copy_job
}
