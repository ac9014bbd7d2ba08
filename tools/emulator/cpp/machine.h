// The machine that generated kernels run on: one CTA after another, each thread of a CTA a fiber of one OS thread.
//
// A warp runs until all its lanes wait; which warp runs next follows priorities drawn from a seed, so that a kernel
// that leans on an order it did not ask for meets other orders under other seeds.  Whatever is asynchronous on the
// device (tensor copies, warp group products) happens at once or as late as it may, again as the seed says.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu {

struct Index {
  unsigned x, y, z;
};

// Ends the run with a message that names the thread at fault.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- Scheduling

// Runs on behalf of all lanes in `mask` once the last of them has come; lanes[i] is what lane i brought.
using Perform = void (*)(void* const* lanes, uint32_t mask);
// Waits until all lanes of this warp in `mask` came to the same operation; the last one performs it for all.
void collective(const char* what, uint32_t mask, void* arguments, Perform perform);
// __syncwarp.
void sync_warp(uint32_t mask);
// Lets other warps run, if the seed likes them better.
void yield();
unsigned lane();
// The index of this thread's warp in its warp group, and of the warp in its CTA.
unsigned warp();
// Lanes of this warp that exist.
uint32_t whole_warp();
// Whether operations that may or may not wait for their warp do so in this run.
bool strict_convergence();

// Barrier `id` of the CTA; with `count` 0 all threads that have not exited.
void named_barrier(int id, int count, bool wait);

// ---- Shared memory.  Addresses are those of the shared window: 32 bits, the first 1024 bytes unused.

void* dynamic_shared();
void* static_shared(const char* name, int declaration, size_t bytes, size_t alignment);
template <typename Array>
Array& shared_array(const char* name, int declaration, size_t alignment) {
  return *static_cast<Array*>(static_shared(name, declaration, sizeof(Array), alignment));
}
uint32_t shared_address(const void* pointer);
// Fails unless [address, address + bytes) lies in one allocation and the address is aligned.
char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* who);

// One to four words of this thread.
void load_shared(uint32_t address, void* words, size_t bytes);
void store_shared(uint32_t address, const void* words, size_t bytes);
// Loads 8 x 8 matrices of 16-bit elements into `registers`, or stores them: lanes 8 i .. 8 i + 7 bring the rows of
// matrix i.
void move_matrices(uint32_t address, uint32_t* registers, int count, bool transposed, bool store);
// What this thread knows to be written becomes visible to asynchronous readers.
void proxy_fence();

// ---- Transaction barriers

void mbarrier_init(const void* barrier, uint32_t count);
void mbarrier_arrive(const void* barrier);
void mbarrier_expect(const void* barrier, uint32_t bytes);
bool mbarrier_passed(const void* barrier, uint32_t parity);
void mbarrier_wait(const void* barrier, uint32_t parity);

// ---- Tensor copies

struct TensorMap {
  uint64_t base;
  uint64_t dims[5];     // elements, innermost first
  uint64_t strides[5];  // bytes; strides[0] is an element
  uint32_t box[5];      // elements
  int32_t rank;
  int32_t swizzle;  // of units of 16 bytes in rows of 16 << swizzle; 0: none
};
void tensor_load(const TensorMap& map, const void* barrier, const void* shared, const int32_t* coordinates, int rank);
void tensor_store(const TensorMap& map, const void* shared, const int32_t* coordinates, int rank);
void bulk_load(void* shared, const void* global, const void* barrier, uint32_t bytes);
void bulk_store(void* global, const void* shared, uint32_t bytes);
void bulk_commit();
void bulk_wait(int pending);

// Copies of one thread (cp.async); without `global` the bytes become zero.
void thread_copy(const void* shared, const void* global, uint32_t bytes);
void thread_copy_commit();
void thread_copy_wait(int pending);

// ---- Products

struct Product {
  uint64_t a, b;              // descriptors; `a` unused if the operand is in registers
  const uint32_t* registers;  // operand A, or null
  float* accumulators;
  int columns;            // N
  bool half, a_mn, b_mn;  // fp16 instead of bf16; operands are MN-major
  float sign;             // of the product
  bool keep;              // add to the old accumulators
};
void product_issue(const Product& product);
void product_fence();
void product_commit();
void product_wait(int pending);
// acc[16 x 8] <- c + a[16 x k] b[k x 8], of a warp; k is 8 or 16.
void warp_product(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, bool half);

// ---- 16-bit numbers

float from_half(uint16_t bits);
uint16_t to_half(float value);
inline float from_bfloat16(uint16_t bits) {
  union {
    uint32_t word;
    float value;
  } both{uint32_t(bits) << 16};
  return both.value;
}
inline uint16_t to_bfloat16(float value) {
  union {
    float value;
    uint32_t word;
  } both{value};
  if ((both.word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((both.word + 0x7fffu + (both.word >> 16 & 1u)) >> 16);
}

}  // namespace emu

extern emu::Index threadIdx, blockIdx, blockDim, gridDim;
