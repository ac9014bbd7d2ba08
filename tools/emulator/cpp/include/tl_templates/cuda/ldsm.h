#pragma once

#include "common.h"

namespace tl {

EMU_INSTRUCTION void ptx_ldmatrix_x4(const void* shared, void* local) {
  uint32_t* out = static_cast<uint32_t*>(local);
  emu::ptx::load_matrices<false>(emu::shared_address(shared), out[0], out[1], out[2], out[3]);
}
EMU_INSTRUCTION void ptx_ldmatrix_x4_trans(const void* shared, void* local) {
  uint32_t* out = static_cast<uint32_t*>(local);
  emu::ptx::load_matrices<true>(emu::shared_address(shared), out[0], out[1], out[2], out[3]);
}
EMU_INSTRUCTION void ptx_ldmatrix_x2(const void* shared, void* local) {
  uint32_t* out = static_cast<uint32_t*>(local);
  emu::ptx::load_matrices<false>(emu::shared_address(shared), out[0], out[1]);
}
EMU_INSTRUCTION void ptx_ldmatrix_x2_trans(const void* shared, void* local) {
  uint32_t* out = static_cast<uint32_t*>(local);
  emu::ptx::load_matrices<true>(emu::shared_address(shared), out[0], out[1]);
}
template <typename... Word>
EMU_INSTRUCTION void ptx_stmatrix_m8n8_x4(const void* shared, Word... in) {
  static_assert(sizeof...(in) == 4);
  emu::ptx::store_matrices<false>(emu::shared_address(shared), in...);
}
template <typename... Word>
EMU_INSTRUCTION void ptx_stmatrix_m8n8_x4_trans(const void* shared, Word... in) {
  static_assert(sizeof...(in) == 4);
  emu::ptx::store_matrices<true>(emu::shared_address(shared), in...);
}
template <typename... Word>
EMU_INSTRUCTION void ptx_stmatrix_m8n8_x2(const void* shared, Word... in) {
  static_assert(sizeof...(in) == 2);
  emu::ptx::store_matrices<false>(emu::shared_address(shared), in...);
}

}  // namespace tl
