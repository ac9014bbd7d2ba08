"""The warp groups that make the operands of a state recurrence ahead of it: macros shared by several templates."""


def operands_role(C, DK, stages_k, stages_a, stages_x, whole_chunks=False):
    """A TileLang macro ``(chunks, length, k_s, a_s, x_s, tail, and the rings' barriers)`` for one warp group.

    C, DK: chunk size and head_dim_k.  stages: of the rings of K (with its gates), Ã and X.  length: tokens in all; with
    whole_chunks a multiple of C.  Rows of K past the end are cleared in shared memory: 0 · NaN would reach X.
    """
    import tilelang.language as T

    rows = T.GemmWarpPolicy.FullRow

    @T.macro
    def run_operands(chunks, length, k_s, a_s, x_s, tail, k_full, k_free, a_full, a_free, x_full, x_free):
        row_factors = T.alloc_local((2,), "float32")  # γ_C/γ of this thread's rows
        x_left = T.alloc_fragment((C, 64), "float32")
        x_right = T.alloc_fragment((C, 64), "float32")
        for i in T.unroll(stages_a):  # the quarter of Ã above the diagonal, which is not loaded
            T.call_extern("handle", "qla::clear_units", T.access_ptr(a_s[i, 0, C // 2], "w"))
        T.fence_proxy_async()
        T.sync_threads(2, 128)
        for i in T.serial(chunks):
            kk, aa, xx = i % stages_k, i % stages_a, i % stages_x
            T.barrier_wait(k_full[kk], (i // stages_k) % 2)
            if not whole_chunks:
                if length - i * C < C:
                    T.call_extern("handle", "qla::clear_rows", T.access_ptr(k_s[kk, 0, 0], "rw"), DK, length - i * C)
                    T.fence_proxy_async()
                    T.sync_threads(2, 128)
            T.barrier_wait(a_full[aa], (i // stages_a) % 2)
            T.call_extern("handle", "qla::forget", x_left.data)
            T.wgmma_gemm(a_s[aa, :, :], k_s[kk, :, 0:64], x_left, transpose_A=True, clear_accum=True, policy=rows)
            if DK == 128:
                T.call_extern("handle", "qla::forget", x_right.data)
                T.wgmma_gemm(
                    a_s[aa, :, :], k_s[kk, :, 64:128], x_right, transpose_A=True, clear_accum=True, policy=rows
                )
            T.call_extern("handle", "qla::load_row_factors", row_factors.data, T.access_ptr(tail[kk, 0], "r"))
            T.barrier_wait(x_free[xx], (i // stages_x + 1) % 2)
            if DK == 128:
                T.wait_wgmma(1)
                T.call_extern(
                    "handle", "qla::store_scaled_rows", x_left.data, row_factors.data,
                    T.access_ptr(x_s[xx, 0, 0], "w"), 0,
                )  # fmt: skip
            T.wait_wgmma(0)
            T.call_extern(
                "handle", "qla::store_scaled_rows", (x_right if DK == 128 else x_left).data, row_factors.data,
                T.access_ptr(x_s[xx, 0, 0], "w"), DK - 64,
            )  # fmt: skip
            T.fence_proxy_async()
            T.barrier_arrive(x_full[xx])
            T.barrier_arrive(k_free[kk])
            T.barrier_arrive(a_free[aa])

    return run_operands


def two_step_operands_role(C, DK, stages_kq, stages_a, stages_xb, dtype, backwards=False, strict=False):
    """A TileLang macro of one warp group that makes X and scale B∘Γ, B = tril(Q Kᵀ) Ã, of each chunk.

    Its arguments: chunks, length (tokens in all), scale, tiles, gates, and the rings' barriers.  Q Kᵀ of the next chunk
    runs behind the last store of a chunk.  backwards: the last chunk comes first, and rows past the end are cleared in
    Q as well, because the backward multiplies them by zeros.  strict: B = tril(Q Kᵀ, −1) Ã.
    """
    import tilelang.language as T

    rows = T.GemmWarpPolicy.FullRow
    lower_operand = "qla::below_diagonal_operand" if strict else "qla::lower_operand"

    @T.macro
    def run_operands(chunks, length, scale, k_s, q_s, a_s, x_s, b_s, log_gamma, decay, tail,
                     kq_full, kq_free, a_full, a_free, xb_full, xb_free):  # fmt: skip
        qk = T.alloc_fragment((C, C), "float32")
        p_op = T.alloc_fragment((C, C), dtype)
        b = T.alloc_fragment((C, C), "float32")
        diagonal = T.alloc_local((10,), "float32")  # of scale · Γ: see diagonal_decay
        row_factors = T.alloc_local((2,), "float32")  # γ_C/γ of this thread's rows
        x_left = T.alloc_fragment((C, 64), "float32")  # X by halves of 64 columns: 32 accumulators instead of 64 live
        x_right = T.alloc_fragment((C, 64), "float32")
        for i in T.unroll(stages_a):  # the quarter of Ã above the diagonal, which is not loaded
            T.call_extern("handle", "qla::clear_units", T.access_ptr(a_s[i, 0, C // 2], "w"))
        T.fence_proxy_async()
        T.sync_threads(2, 128)
        if chunks > 0:
            T.barrier_wait(kq_full[0], 0)
        if backwards:
            left = length - (chunks - 1) * C  # of the last chunk, which comes first
            if chunks > 0 and left < C:
                T.call_extern("handle", "qla::clear_rows", T.access_ptr(k_s[0, 0, 0], "rw"), DK, left)
                T.call_extern("handle", "qla::clear_rows", T.access_ptr(q_s[0, 0, 0], "rw"), DK, left)
                T.fence_proxy_async()
                T.sync_threads(2, 128)
        T.call_extern("handle", "qla::forget", qk.data)
        T.wgmma_gemm(q_s[0, :, :], k_s[0, :, :], qk, transpose_B=True, clear_accum=True, policy=rows)
        T.wait_wgmma(0)
        T.call_extern("handle", lower_operand, qk.data, p_op.data)
        for i in T.serial(chunks):
            kq, aa, xb, ahead = i % stages_kq, i % stages_a, i % stages_xb, (i + 1) % stages_kq
            if not backwards:
                if length - i * C < C:  # rows of the next sequence: 0 · NaN would reach X
                    T.call_extern("handle", "qla::clear_rows", T.access_ptr(k_s[kq, 0, 0], "rw"), DK, length - i * C)
                    T.fence_proxy_async()
                    T.sync_threads(2, 128)
            T.barrier_wait(a_full[aa], (i // stages_a) % 2)
            T.call_extern("handle", "qla::forget", b.data)
            T.wgmma_gemm(p_op, a_s[aa, :, :], b, clear_accum=True, policy=rows)
            T.call_extern("handle", "qla::load_row_factors", row_factors.data, T.access_ptr(tail[kq, 0], "r"))
            T.call_extern(
                "handle", "qla::diagonal_decay", diagonal.data, T.access_ptr(log_gamma[kq, 0], "r"),
                T.access_ptr(decay[kq, 0], "r"), scale,
            )  # fmt: skip
            T.wait_wgmma(0)
            T.call_extern("handle", "qla::forget", x_left.data)
            T.wgmma_gemm(a_s[aa, :, :], k_s[kq, :, 0:64], x_left, transpose_A=True, clear_accum=True, policy=rows)
            T.barrier_wait(xb_free[xb], (i // stages_xb + 1) % 2)
            T.call_extern(
                "handle", "qla::store_decayed", b.data, diagonal.data, T.access_ptr(decay[kq, 0], "r"),
                T.access_ptr(b_s[xb, 0, 0], "w"),
            )  # fmt: skip
            if DK == 128:
                T.call_extern("handle", "qla::forget", x_right.data)
                T.wgmma_gemm(
                    a_s[aa, :, :], k_s[kq, :, 64:128], x_right, transpose_A=True, clear_accum=True, policy=rows
                )
                T.wait_wgmma(1)
                T.call_extern(
                    "handle", "qla::store_scaled_rows", x_left.data, row_factors.data,
                    T.access_ptr(x_s[xb, 0, 0], "w"), 0,
                )  # fmt: skip
            # The next chunk's Q Kᵀ runs behind the last store; past the end its operands are stale and unused.
            if i + 1 < chunks:
                T.barrier_wait(kq_full[ahead], ((i + 1) // stages_kq) % 2)
            T.call_extern("handle", "qla::forget", qk.data)
            T.wgmma_gemm(q_s[ahead, :, :], k_s[ahead, :, :], qk, transpose_B=True, clear_accum=True, policy=rows)
            T.wait_wgmma(1)
            T.call_extern(
                "handle", "qla::store_scaled_rows", (x_right if DK == 128 else x_left).data,
                row_factors.data, T.access_ptr(x_s[xb, 0, 0], "w"), DK - 64,
            )  # fmt: skip
            T.fence_proxy_async()
            T.barrier_arrive(xb_full[xb])
            T.barrier_arrive(kq_free[kq])
            T.barrier_arrive(a_free[aa])
            T.wait_wgmma(0)
            T.call_extern("handle", lower_operand, qk.data, p_op.data)

    return run_operands
