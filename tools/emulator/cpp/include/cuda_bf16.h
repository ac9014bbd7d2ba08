#pragma once

#include "device.h"
