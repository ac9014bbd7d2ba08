#pragma once

#include "barrier.h"

namespace tl {

template <typename... Coordinate>
EMU_INSTRUCTION void tma_load(const CUtensorMap& descriptor, const Barrier& barrier, const void* shared, int32_t first,
                              Coordinate... rest) {
  const int32_t coordinates[] = {first, int32_t(rest)...};
  emu::tensor_load(descriptor.map, &barrier, shared, coordinates, 1 + sizeof...(rest));
}
EMU_INSTRUCTION void tma_load(void* shared, const void* global, const Barrier& barrier, uint32_t bytes) {
  emu::bulk_load(shared, global, &barrier, bytes);
}
template <typename... Coordinate>
EMU_INSTRUCTION void tma_store(const CUtensorMap& descriptor, const void* shared, int32_t first, Coordinate... rest) {
  const int32_t coordinates[] = {first, int32_t(rest)...};
  emu::tensor_store(descriptor.map, shared, coordinates, 1 + sizeof...(rest));
}
EMU_INSTRUCTION void tma_store(void* global, const void* shared, uint32_t bytes) {
  emu::bulk_store(global, shared, bytes);
}
EMU_INSTRUCTION void prefetch_tma_descriptor(const CUtensorMap&) {}

}  // namespace tl
