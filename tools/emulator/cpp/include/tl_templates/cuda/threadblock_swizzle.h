// Nothing of this header is used by the kernels so far.
#pragma once

#include "common.h"
