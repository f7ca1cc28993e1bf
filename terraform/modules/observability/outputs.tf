# SPDX-License-Identifier: Apache-2.0

output "alarm_names" {
  description = "Names of all alarms."
  value = sort(concat(
    [for alarm in values(aws_cloudwatch_metric_alarm.replication_latency) : alarm.alarm_name],
    [for alarm in values(aws_cloudwatch_metric_alarm.replication_failures) : alarm.alarm_name],
    [for alarm in values(aws_cloudwatch_metric_alarm.errors) : alarm.alarm_name],
  ))
}
