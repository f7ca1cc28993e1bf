# SPDX-License-Identifier: Apache-2.0

output "ec_transfer_config" {
  description = "The JSON that `vllm serve --ec-transfer-config` takes, for the engines of each region, and for the jobs of the maintainer."
  value = {
    home       = module.home.ec_transfer_config["ec_both"]
    near       = module.transfer_config.ec_transfer_config["ec_consumer"]
    maintainer = module.transfer_config.ec_transfer_config["ec_both"]
  }
}

output "role_arns" {
  description = "Roles for EKS Pod Identity."
  value = {
    home       = module.engines_home.role_arn
    near       = module.engines_near.role_arn
    maintainer = module.maintainer.role_arn
  }
}

output "policies" {
  description = "What each role may do, statement by statement."
  value = {
    home       = module.engines_home.statements
    near       = module.engines_near.statements
    maintainer = module.maintainer.statements
  }
}
