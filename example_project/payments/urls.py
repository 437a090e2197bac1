from django.urls import path

from . import views

urlpatterns = [
    path("", views.pay, name="pay"),
    path("api/", views.pay_by_program, name="pay-by-program"),
    path("<uuid:key>/", views.payment, name="payment"),
]
