# SPDX-License-Identifier: Apache-2.0
"""What tests share: reading the kernel's state independently, fixtures that own resources."""
