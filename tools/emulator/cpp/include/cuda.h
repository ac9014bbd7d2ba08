#pragma once

#include "device.h"

struct alignas(64) CUtensorMap {
  emu::TensorMap map;
};
